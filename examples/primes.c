/* A WASM tasklet in C: counts the primes up to the number that it is given as text.
 *
 *   clang --target=wasm32 -O2 -nostdlib -Wl,--no-entry -Wl,--strip-all \
 *         -Wl,--export=init -Wl,--export=run -Wl,--export=finalize -o primes.wasm primes.c
 */

typedef unsigned int u32;
typedef unsigned long long u64;

#define MOST 1000000

static char input[32];
static char output[16];
static u32 length;
static char composite[MOST + 1];

/* Where the input is to be put; nowhere if it is too long. */
u32 init(u32 size) { return size <= sizeof input ? (u32)input : ~0u; }

/* 0 is success. */
u32 run(const char *text, u32 size) {
  u32 most = 0, count = 0;
  if (size == 0) return 1;
  for (u32 i = 0; i < size; i++) {
    if (text[i] < '0' || text[i] > '9') return 1;
    most = 10 * most + (u32)(text[i] - '0');
    if (most > MOST) return 2;
  }
  for (u32 n = 2; n <= most; n++) {
    if (composite[n]) continue;
    count++;
    for (u64 m = (u64)n * n; m <= most; m += n) composite[m] = 1;
  }
  char digits[16];
  u32 places = 0;
  do digits[places++] = (char)('0' + count % 10), count /= 10;
  while (count);
  for (length = 0; places;) output[length++] = digits[--places];
  return 0;
}

/* Where the output lies: the address in the high 32 bits, the length in the low ones. */
u64 finalize(void) { return (u64)(u32)output << 32 | length; }
