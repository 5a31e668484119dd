/* libcuda.so.1 of the pretended cards: devices, primary contexts, memory, streams, checkpoints.
 *
 * Memory of a card is a file that its processes map: what one leaves there the next one finds. Nothing is asynchronous:
 * a call has done its work when it returns, which every program must bear. Names and arguments are those of cuda.h.
 */
#define _GNU_SOURCE
#include "modules.h"
#include "state.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef int Code; /* CUresult */
enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, UNKNOWN = 999,
};
enum { EXCLUSIVE_THREAD = 1, PROHIBITED = 2, EXCLUSIVE_PROCESS = 3 }; /* nvmlComputeMode_t */

typedef unsigned long long Address; /* CUdeviceptr */
typedef struct context *Context;
typedef struct { unsigned char bytes[16]; } Uuid;
typedef struct { unsigned int timeout_ms, reserved0; uint64_t reserved1[7]; } LockArgs;
typedef struct { Uuid before, after; } Pair;
typedef struct { Pair *pairs; unsigned int count, reserved[13]; } RestoreArgs;

#define PAGE ((uint64_t)4096)
#define LARGE ((uint64_t)2 << 20)

static pthread_mutex_t here = PTHREAD_MUTEX_INITIALIZER; /* what follows */
static pid_t begun_in;
static size_t me = PROCESSES; /* our row */
static size_t visible[CARDS], visible_count;
static unsigned retained[CARDS];
static int memory_of[CARDS], nodes[CARDS + 2], control = -1;
static __thread size_t current = CARDS; /* the card of this thread's context */
static Code broken; /* what a kernel did to the contexts of this process; there is no way back */

static struct process *mine(void) { return &rig()->processes[me]; }

static void wait_for_change(uint64_t *word, uint64_t seen)
{
    struct timespec at_most = {0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)seen, &at_most, NULL, 0);
}

static void set(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static uint64_t get(uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

/* ---- every call ----
 *
 * A process that is being suspended does nothing: its calls wait until it runs again. So each one is counted while it
 * is under way. The calls about other processes, and those that touch no device, are not.
 */
static Code begin(const char *call, bool works)
{
    Code code = (Code)rig_trouble(call);
    if (code)
        return code;
    if (begun_in != getpid()) /* never begun; or in a parent, whose contexts a forked child has not */
        return NOT_INITIALIZED;
    while (works) {
        __atomic_fetch_add(&mine()->calls, 1, __ATOMIC_SEQ_CST);
        uint64_t state = get(&mine()->state);
        if (state == RUNNING)
            break;
        __atomic_fetch_sub(&mine()->calls, 1, __ATOMIC_SEQ_CST);
        if (state == FAILED)
            return UNKNOWN;
        wait_for_change(&mine()->state, state);
    }
    return SUCCESS;
}

static Code end(Code code)
{
    __atomic_fetch_sub(&mine()->calls, 1, __ATOMIC_SEQ_CST);
    return code;
}

#define BEGIN(works)                                                                                                   \
    Code begun = begin(__func__, works);                                                                               \
    if (begun != SUCCESS)                                                                                              \
    return begun

#define BEGIN_IN_CONTEXT                                                                                               \
    BEGIN(true);                                                                                                       \
    if (current == CARDS || broken)                                                                                    \
    return end(broken ? broken : INVALID_CONTEXT)

/* ---- the beginning ---- */

static bool opens(char *path, int *fd)
{
    *fd = open(path, O_RDWR | O_CLOEXEC);
    return *fd >= 0;
}

/* CUDA_VISIBLE_DEVICES: numbers or UUIDs (their beginning is enough), in this order. The first entry that names no card
 * of this machine ends the list; an empty list is no card at all. A part of a card is seen if it is named, and alone; or
 * if nothing is named and there is no whole card. */
static void choose(const size_t *there, size_t count)
{
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (!wanted) {
        for (size_t i = 0; i < count; i++)
            if (!rig()->cards[there[i]].parent)
                visible[visible_count++] = there[i];
        if (visible_count == 0 && count > 0)
            visible[visible_count++] = there[0];
        return;
    }
    char *copy = strdup(wanted), *rest = copy, *word;
    while ((word = strsep(&rest, ",")) && visible_count < CARDS) {
        size_t found = CARDS;
        char *after;
        long index = strtol(word, &after, 10);
        if (*word && !*after)
            found = index >= 0 && (size_t)index < count ? there[index] : CARDS;
        else
            for (size_t i = 0; i < count && found == CARDS && strlen(word) > 4; i++) {
                char text[NAME];
                rig_uuid(&rig()->cards[there[i]], text);
                found = strncmp(text, word, strlen(word)) == 0 ? there[i] : CARDS;
            }
        if (found == CARDS)
            break;
        visible[visible_count++] = found;
        if (rig()->cards[found].parent)
            break;
    }
    free(copy);
}

/* The device files: those of all cards that this process may open are cards to it, before any choice. */
static Code open_nodes(size_t *there, size_t *count)
{
    char path[64] = "/dev/nvidiactl";
    struct state *s = rig();
    if (s->nodes && !(opens(path, &nodes[CARDS]) && opens(strcpy(path, "/dev/nvidia-uvm"), &nodes[CARDS + 1])))
        return NO_DEVICE;
    for (size_t i = 0; i < CARDS; i++) {
        if (!s->cards[i].present || s->cards[i].hidden || s->cards[i].split)
            continue;
        snprintf(path, sizeof path, "/dev/nvidia%u", (unsigned)s->cards[i].node);
        if (!s->nodes || opens(path, &nodes[i]))
            there[(*count)++] = i;
    }
    return SUCCESS;
}

static void *serve_orders(void *unused);

API Code cuInit(unsigned int flags)
{
    if (!rig())
        return NO_DEVICE;
    Code code = (Code)rig_trouble(__func__);
    if (code || flags)
        return code ? code : INVALID_VALUE;
    if (rig()->init_code)
        return (Code)rig()->init_code;
    pthread_mutex_lock(&here);
    if (begun_in == 0) {
        size_t there[CARDS], count = 0;
        code = open_nodes(there, &count);
        if (code == SUCCESS)
            choose(there, count);
        if (code == SUCCESS && (me = rig_enrol()) == PROCESSES)
            code = OUT_OF_MEMORY;
        pthread_t server;
        if (code == SUCCESS && pthread_create(&server, NULL, serve_orders, NULL) != 0)
            code = OUT_OF_MEMORY;
        if (code == SUCCESS && visible_count == 0)
            code = NO_DEVICE;
        begun_in = code == SUCCESS ? getpid() : 0;
        if (code == SUCCESS)
            control = rig_open_driver();
    } else if (begun_in != getpid()) {
        code = NOT_INITIALIZED;
    }
    pthread_mutex_unlock(&here);
    return code;
}

/* Private tables of NVIDIA's own libraries: NVRTC asks for one when it compiles, and does without. */
API Code cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    *table = NULL;
    return 500; /* CUDA_ERROR_NOT_FOUND */
}

API Code cuDriverGetVersion(int *version)
{
    Code code = (Code)rig_trouble(__func__); /* also of one that has not begun */
    if (!code)
        *version = rig() ? (int)rig()->cuda : 0;
    return code;
}

API Code cuGetErrorString(Code code, const char **text)
{
    switch (code) {
    case SUCCESS: *text = "no error"; break;
    case INVALID_VALUE: *text = "invalid argument"; break;
    case OUT_OF_MEMORY: *text = "out of memory"; break;
    case NOT_INITIALIZED: *text = "initialization error"; break;
    case DEVICE_UNAVAILABLE: *text = "CUDA-capable device(s) is/are busy or unavailable"; break;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
    case INVALID_IMAGE: *text = "device kernel image is invalid"; break;
    case INVALID_CONTEXT: *text = "invalid device context"; break;
    case ILLEGAL_STATE: *text = "the operation cannot be performed in the present state"; break;
    case NOT_READY: *text = "device not ready"; break;
    case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
    case NOT_SUPPORTED: *text = "operation not supported"; break;
    case 802: *text = "system not yet initialized"; break;
    case 999: *text = "unknown error"; break;
    default: *text = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}

/* ---- devices ---- */

static struct card *card_of(int device)
{
    return device >= 0 && (size_t)device < visible_count ? &rig()->cards[visible[device]] : NULL;
}

#define CARD(device)                                                                                                   \
    BEGIN(false);                                                                                                      \
    struct card *card = card_of(device);                                                                               \
    if (!card)                                                                                                         \
    return INVALID_DEVICE

API Code cuDeviceGetCount(int *count)
{
    BEGIN(false);
    *count = (int)visible_count;
    return SUCCESS;
}

API Code cuDeviceGet(int *device, int ordinal)
{
    CARD(ordinal);
    (void)card;
    *device = ordinal;
    return SUCCESS;
}

API Code cuDeviceGetUuid_v2(Uuid *uuid, int device)
{
    CARD(device);
    memcpy(uuid->bytes, card->uuid, sizeof uuid->bytes);
    return SUCCESS;
}

API Code cuDeviceGetName(char *name, int length, int device)
{
    CARD(device);
    snprintf(name, (size_t)length, "%s", card->model);
    return SUCCESS;
}

API Code cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CARD(device);
    *value = attribute == 75 ? (int)card->major : attribute == 76 ? (int)card->minor : 0;
    return SUCCESS;
}

API Code cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    CARD(device);
    *bytes = card->memory - card->reserved;
    return SUCCESS;
}

/* ---- contexts: only the primary one of each card ---- */

static Code make_context(size_t row)
{
    struct card *card = &rig()->cards[row];
    if (card->compute_mode == PROHIBITED)
        return DEVICE_UNAVAILABLE;
    for (size_t i = 0; card->compute_mode == EXCLUSIVE_PROCESS && i < PROCESSES; i++)
        if (i != me && rig()->processes[i].taken && rig()->processes[i].contexts[row])
            return DEVICE_UNAVAILABLE;
    if (rig_used(row) + card->context > card->memory - card->reserved)
        return OUT_OF_MEMORY;
    if ((memory_of[row] = rig_memory(row)) < 0)
        return UNKNOWN;
    mine()->contexts[row] = card->context;
    return SUCCESS;
}

/* Under the lock: all that this process has on a card goes, as its context does. */
static void drop_context(size_t row)
{
    for (size_t at = 0; at < PIECES; at++) {
        struct piece *piece = &rig()->pieces[at];
        if (piece->bytes && piece->process == me && piece->card == row) {
            munmap((void *)(uintptr_t)piece->address, piece->bytes);
            piece->bytes = 0;
        }
    }
    mine()->contexts[row] = 0;
    close(memory_of[row]);
}

API Code cuDevicePrimaryCtxRetain(Context *context, int device)
{
    BEGIN(true);
    if (!card_of(device))
        return end(INVALID_DEVICE);
    size_t row = visible[device];
    int held = rig_lock();
    rig_forget_the_dead();
    Code code = retained[row] ? SUCCESS : make_context(row);
    retained[row] += code == SUCCESS;
    rig_unlock(held);
    *context = (Context)(uintptr_t)(0xC000 + row);
    return end(code);
}

API Code cuDevicePrimaryCtxRelease_v2(int device)
{
    BEGIN(true);
    if (!card_of(device) || !retained[visible[device]])
        return end(INVALID_CONTEXT);
    int held = rig_lock();
    if (--retained[visible[device]] == 0)
        drop_context(visible[device]);
    rig_unlock(held);
    return end(SUCCESS);
}

API Code cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active)
{
    CARD(device);
    (void)card;
    *flags = 0, *active = retained[visible[device]] > 0;
    return SUCCESS;
}

API Code cuCtxSetCurrent(Context context)
{
    BEGIN(false);
    size_t row = (uintptr_t)context - 0xC000;
    if (context && (row >= CARDS || !retained[row]))
        return INVALID_CONTEXT;
    current = context ? row : CARDS;
    return SUCCESS;
}

API Code cuCtxGetCurrent(Context *context)
{
    BEGIN(false);
    *context = current == CARDS ? NULL : (Context)(uintptr_t)(0xC000 + current);
    return SUCCESS;
}

API Code cuCtxSynchronize(void)
{
    BEGIN_IN_CONTEXT;
    return end(SUCCESS);
}

/* ---- memory ---- */

static uint64_t rounded(uint64_t bytes)
{
    uint64_t step = bytes < LARGE / 2 ? PAGE : LARGE; /* small ones share a page of the card; so this is near it */
    return (bytes + step - 1) / step * step;
}

/* Under the lock: a free place of this size on the card, and a row for it; PIECES if there is none. */
static size_t place(size_t row, uint64_t bytes)
{
    struct card *card = &rig()->cards[row];
    struct piece *pieces = rig()->pieces;
    if (rig_used(row) + bytes > card->memory - card->reserved)
        return PIECES;
    size_t free_row = PIECES;
    uint64_t offset = 0;
    for (bool moved = true; moved;) { /* past each piece in the way; offsets only grow, so this ends */
        moved = false;
        for (size_t at = 0; at < PIECES; at++) {
            struct piece *piece = &pieces[at];
            if (!piece->bytes)
                free_row = at;
            else if (piece->card == row && offset < piece->offset + piece->bytes && piece->offset < offset + bytes)
                offset = piece->offset + piece->bytes, moved = true;
        }
    }
    if (free_row == PIECES || offset + bytes > card->memory)
        return PIECES;
    pieces[free_row] = (struct piece){.bytes = bytes, .card = row, .process = me, .offset = offset};
    return free_row;
}

static bool map_piece(struct piece *piece, void *where)
{
    void *found = mmap(where, piece->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | (where ? MAP_FIXED : 0),
                       memory_of[piece->card], (off_t)piece->offset);
    if (found == MAP_FAILED)
        return false;
    piece->address = (uintptr_t)found;
    return true;
}

/* The piece of ours that holds all of this. No lock: only this process makes and drops its own. */
static struct piece *piece_at(Address address, uint64_t bytes)
{
    for (size_t at = 0; at < PIECES; at++) {
        struct piece *piece = &rig()->pieces[at];
        if (piece->bytes && piece->process == me && piece->address <= address &&
            address + bytes <= piece->address + piece->bytes)
            return piece;
    }
    return NULL;
}

API Code cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    BEGIN_IN_CONTEXT;
    struct card *card = &rig()->cards[current];
    int held = rig_lock();
    rig_forget_the_dead();
    *total = card->memory - card->reserved;
    *free_bytes = *total - rig_used(current);
    rig_unlock(held);
    return end(SUCCESS);
}

API Code cuMemAlloc_v2(Address *address, size_t bytes)
{
    BEGIN_IN_CONTEXT;
    if (!bytes)
        return end(INVALID_VALUE);
    Code code = OUT_OF_MEMORY;
    int held = rig_lock();
    rig_forget_the_dead();
    size_t found = place(current, rounded(bytes));
    if (found < PIECES && map_piece(&rig()->pieces[found], NULL)) {
        *address = rig()->pieces[found].address;
        code = SUCCESS;
    } else if (found < PIECES) {
        rig()->pieces[found].bytes = 0;
    }
    rig_unlock(held);
    return end(code);
}

API Code cuMemFree_v2(Address address)
{
    BEGIN(true);
    struct piece *piece = piece_at(address, 1);
    if (!address)
        return end(SUCCESS);
    if (!piece || piece->address != address)
        return end(INVALID_VALUE);
    munmap((void *)(uintptr_t)address, piece->bytes);
    set(&piece->bytes, 0);
    return end(SUCCESS);
}

/* All of it, by the file of the card: what is written there needs no page of this process. */
static bool write_all(int file, const char *from, size_t bytes, off_t at)
{
    while (bytes) {
        ssize_t count = pwrite(file, from, bytes, at);
        if (count <= 0)
            return false;
        from += count, bytes -= (size_t)count, at += count;
    }
    return true;
}

/* Zeros over whole pages are made by giving the pages back: 80 GB are overwritten in a moment, and read as zeros. */
static bool fill(const struct piece *piece, Address address, const void *pattern, size_t width, size_t count)
{
    uint64_t bytes = (uint64_t)width * count, offset = piece->offset + (address - piece->address);
    int file = memory_of[piece->card];
    static const unsigned char zeros[4];
    if (memcmp(pattern, zeros, width) == 0 && offset % PAGE == 0 && bytes % PAGE == 0 &&
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) == 0)
        return true;
    char many[1 << 16]; /* a multiple of every width */
    size_t most = bytes < sizeof many ? bytes : sizeof many;
    for (size_t at = 0; at < most; at += width)
        memcpy(many + at, pattern, width);
    for (uint64_t at = 0; at < bytes; at += most)
        if (!write_all(file, many, bytes - at < most ? bytes - at : most, (off_t)(offset + at)))
            return false;
    return true;
}

static Code fill_all(const char *call, Address address, const void *pattern, size_t width, size_t count)
{
    Code code = begin(call, true);
    if (code != SUCCESS)
        return code;
    struct piece *piece = piece_at(address, (uint64_t)width * count);
    if (broken || current == CARDS || !piece)
        return end(broken ? broken : current == CARDS ? INVALID_CONTEXT : INVALID_VALUE);
    return end(fill(piece, address, pattern, width, count) ? SUCCESS : UNKNOWN);
}

API Code cuMemsetD8_v2(Address to, unsigned char value, size_t n) { return fill_all(__func__, to, &value, 1, n); }

API Code cuMemsetD8Async(Address to, unsigned char value, size_t n, void *stream)
{
    (void)stream;
    return fill_all(__func__, to, &value, 1, n);
}

API Code cuMemsetD16Async(Address to, unsigned short value, size_t n, void *stream)
{
    (void)stream;
    return fill_all(__func__, to, &value, 2, n);
}

API Code cuMemsetD32Async(Address to, unsigned int value, size_t n, void *stream)
{
    (void)stream;
    return fill_all(__func__, to, &value, 4, n);
}

/* One side may be memory of the host: "device" says which sides must be ours. */
static Code copy(const char *call, Address to, bool to_device, Address from, bool from_device, size_t bytes)
{
    Code code = begin(call, true);
    if (code != SUCCESS)
        return code;
    if (broken || current == CARDS)
        return end(broken ? broken : INVALID_CONTEXT);
    if ((to_device && !piece_at(to, bytes)) || (from_device && !piece_at(from, bytes)))
        return end(INVALID_VALUE);
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return end(SUCCESS);
}

API Code cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream)
{
    (void)stream;
    return copy(__func__, to, true, (uintptr_t)from, false, bytes);
}

API Code cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream)
{
    (void)stream;
    return copy(__func__, (uintptr_t)to, false, from, true, bytes);
}

API Code cuMemcpyHtoD_v2(Address to, const void *from, size_t bytes)
{
    return copy(__func__, to, true, (uintptr_t)from, false, bytes);
}

API Code cuMemcpyDtoH_v2(void *to, Address from, size_t bytes)
{
    return copy(__func__, (uintptr_t)to, false, from, true, bytes);
}

API Code cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream)
{
    (void)stream;
    return copy(__func__, to, true, from, true, bytes);
}

/* Pinned memory of the host is memory. */
API Code cuMemAllocHost_v2(void **memory, size_t bytes)
{
    BEGIN_IN_CONTEXT;
    *memory = bytes ? malloc(bytes) : NULL;
    return end(*memory ? SUCCESS : bytes ? OUT_OF_MEMORY : INVALID_VALUE);
}

API Code cuMemFreeHost(void *memory)
{
    BEGIN_IN_CONTEXT;
    free(memory);
    return end(SUCCESS);
}

/* ---- streams: everything is done already ---- */

API Code cuStreamCreate(void **stream, unsigned int flags)
{
    BEGIN_IN_CONTEXT;
    (void)flags;
    *stream = malloc(1);
    return end(SUCCESS);
}

API Code cuStreamSynchronize(void *stream)
{
    BEGIN_IN_CONTEXT;
    (void)stream;
    return end(SUCCESS);
}

API Code cuStreamDestroy_v2(void *stream)
{
    BEGIN(true);
    free(stream);
    return end(SUCCESS);
}

/* ---- modules and launches ---- */

/* CUDA's binary utilities: cubins of the toolkits 12 have ABI 7, those of 13 have 8; a driver takes no newer one. */
static unsigned newest_cubin(void) { return rig()->cuda < 13000 ? 7 : 8; }

API Code cuModuleLoadData(struct module **module, const void *image)
{
    BEGIN_IN_CONTEXT;
    struct card *card = &rig()->cards[current];
    *module = module_read(image, newest_cubin(), (unsigned)(10 * card->major + card->minor));
    return end(*module ? SUCCESS : INVALID_IMAGE);
}

API Code cuModuleUnload(struct module *module)
{
    BEGIN_IN_CONTEXT;
    module_forget(module);
    return end(SUCCESS);
}

API Code cuModuleGetFunctionCount(unsigned int *count, struct module *module)
{
    BEGIN_IN_CONTEXT;
    *count = (unsigned int)module->count;
    return end(SUCCESS);
}

API Code cuModuleEnumerateFunctions(struct kernel **functions, unsigned int count, struct module *module)
{
    BEGIN_IN_CONTEXT;
    for (struct kernel *one = module->kernels; one && count; one = one->next, count--)
        *functions++ = one;
    return end(SUCCESS);
}

API Code cuModuleGetFunction(struct kernel **function, struct module *module, const char *name)
{
    BEGIN_IN_CONTEXT;
    struct kernel *one = module->kernels;
    while (one && strcmp(one->name, name) != 0)
        one = one->next;
    *function = one;
    return end(one ? SUCCESS : NOT_FOUND);
}

API Code cuFuncGetName(const char **name, struct kernel *function)
{
    BEGIN(false);
    *name = function->name;
    return SUCCESS;
}

API Code cuFuncGetParamInfo(struct kernel *function, size_t index, size_t *offset, size_t *size)
{
    BEGIN(false);
    if (index >= function->count)
        return INVALID_VALUE;
    *offset = function->offsets[index], *size = function->sizes[index];
    return SUCCESS;
}

/* For libcupti: it is told of each kernel that ran. */
static void (*watcher)(void);
API void rig_watch_kernels(void (*seen)(void)) { watcher = seen; }

static bool reaches(uint64_t address, uint64_t bytes) { return piece_at(address, bytes) != NULL; }

/* A kernel that reaches for what is not there ends its context: every call after it says so. */
API Code cuLaunchKernel(struct kernel *function, unsigned int blocks_x, unsigned int blocks_y, unsigned int blocks_z,
                        unsigned int x, unsigned int y, unsigned int z, unsigned int shared, void *stream,
                        void **arguments, void **more)
{
    BEGIN_IN_CONTEXT;
    (void)shared, (void)stream, (void)more;
    if (!blocks_x || !blocks_y || !blocks_z || !x || !y || !z || (uint64_t)x * y * z > 1024)
        return end(INVALID_VALUE);
    struct grid grid = {x, y, blocks_x, blocks_y};
    broken = kernel_run(function, &grid, arguments, reaches);
    mine()->launches++;
    Code code = end(SUCCESS);
    if (watcher)
        watcher();
    return code;
}

/* ---- checkpoints ----
 *
 * The work is done inside the process that is suspended, by a thread that cuInit started there; so a process that
 * stands still keeps its asker waiting. What was on the card lies in its own memory meanwhile.
 */
struct saved {
    struct saved *next;
    size_t card;
    uint64_t address, bytes;
    void *data;
};
static struct saved *all_saved;
static uint64_t saved_contexts[CARDS];

static Code save(void)
{
    Code code = SUCCESS;
    int held = rig_lock();
    for (size_t at = 0; at < PIECES; at++) {
        struct piece *piece = &rig()->pieces[at];
        if (!piece->bytes || piece->process != me)
            continue;
        struct saved *one = malloc(sizeof *one);
        void *where = (void *)(uintptr_t)piece->address;
        *one = (struct saved){all_saved, piece->card, piece->address, piece->bytes, malloc(piece->bytes)};
        memcpy(one->data, where, piece->bytes);
        all_saved = one;
        /* The addresses stay taken: nothing else may come to lie there. */
        mmap(where, piece->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        piece->bytes = 0;
    }
    for (size_t row = 0; row < CARDS; row++) {
        saved_contexts[row] = mine()->contexts[row];
        if (saved_contexts[row])
            close(memory_of[row]);
        mine()->contexts[row] = 0;
    }
    rig_unlock(held);
    for (size_t i = 0; i < CARDS + 2; i++)
        if (nodes[i] > 0)
            close(nodes[i]), nodes[i] = 0;
    if (control >= 0)
        close(control), control = -1;
    return code;
}

static size_t now_card(size_t row) { return mine()->becomes[row] ? mine()->becomes[row] - 1 : row; }

static Code load(void)
{
    Code code = SUCCESS;
    unsigned moved[CARDS] = {0};
    control = rig_open_driver();
    int held = rig_lock();
    rig_forget_the_dead();
    for (size_t row = 0; row < CARDS && code == SUCCESS; row++)
        if (saved_contexts[row]) {
            code = make_context(now_card(row));
            moved[now_card(row)] = retained[row];
        }
    if (code == SUCCESS)
        memcpy(retained, moved, sizeof moved);
    while (all_saved && code == SUCCESS) {
        struct saved *one = all_saved;
        size_t at = place(now_card(one->card), one->bytes);
        if (at == PIECES || !map_piece(&rig()->pieces[at], (void *)(uintptr_t)one->address)) {
            code = OUT_OF_MEMORY;
            break;
        }
        memcpy((void *)(uintptr_t)one->address, one->data, one->bytes);
        all_saved = one->next;
        free(one->data);
        free(one);
    }
    for (size_t i = 0; i < visible_count && code == SUCCESS; i++)
        visible[i] = now_card(visible[i]);
    rig_unlock(held);
    return code;
}

static void *serve_orders(void *unused)
{
    for (;;) {
        uint64_t order = get(&mine()->order);
        if (order == NOTHING) {
            wait_for_change(&mine()->order, NOTHING);
            continue;
        }
        mine()->outcome = (uint64_t)(order == SAVE ? save() : load());
        set(&mine()->order, NOTHING);
    }
    return unused;
}

/* The row of another process that has begun CUDA, by the pid that we know it by. */
static struct process *process_of(int pid)
{
    for (size_t i = 0; i < PROCESSES; i++)
        if (rig()->processes[i].taken && !rig()->processes[i].pretended && rig_pid(i) == pid)
            return &rig()->processes[i];
    return NULL;
}

#define PROCESS(pid, wanted)                                                                                           \
    BEGIN(false);                                                                                                      \
    struct process *process = process_of(pid);                                                                         \
    if (!process || get(&process->state) != (wanted))                                                                  \
    return process ? ILLEGAL_STATE : NOT_INITIALIZED

static Code have_done(struct process *process, int pid, uint64_t order)
{
    set(&process->order, order);
    while (get(&process->order) != NOTHING) {
        if (process_of(pid) != process)
            return NOT_INITIALIZED; /* it died meanwhile */
        wait_for_change(&process->order, order);
    }
    return (Code)process->outcome;
}

API Code cuCheckpointProcessGetState(int pid, int *state)
{
    BEGIN(false);
    struct process *process = process_of(pid);
    if (!process)
        return NOT_INITIALIZED;
    *state = (int)get(&process->state);
    return SUCCESS;
}

API Code cuCheckpointProcessLock(int pid, LockArgs *args)
{
    PROCESS(pid, RUNNING);
    if (rig()->mps)
        return NOT_SUPPORTED;
    uint64_t until_ns = rig_now_ns() + (args ? args->timeout_ms : 0) * 1000000ull;
    set(&process->state, LOCKED);
    while (get(&process->calls)) {
        if (args && args->timeout_ms && rig_now_ns() > until_ns) {
            set(&process->state, RUNNING);
            return NOT_READY;
        }
        rig_sleep_ms(1);
    }
    return SUCCESS;
}

API Code cuCheckpointProcessCheckpoint(int pid, void *args)
{
    PROCESS(pid, LOCKED);
    (void)args;
    Code code = have_done(process, pid, SAVE);
    set(&process->state, code == SUCCESS ? CHECKPOINTED : FAILED);
    return code;
}

static size_t row_of(const Uuid *uuid)
{
    for (size_t i = 0; i < CARDS; i++)
        if (rig()->cards[i].present && memcmp(rig()->cards[i].uuid, uuid->bytes, sizeof uuid->bytes) == 0)
            return i;
    return CARDS;
}

/* A map, if there is one, has to name every card of the machine, each as the new one of one pair. */
API Code cuCheckpointProcessRestore(int pid, RestoreArgs *args)
{
    PROCESS(pid, CHECKPOINTED);
    uint64_t becomes[CARDS] = {0};
    unsigned int count = args ? args->count : 0, present = 0;
    bool taken[CARDS] = {false};
    for (size_t i = 0; i < CARDS; i++)
        present += rig()->cards[i].present != 0;
    if (count && (rig()->cuda < 13000 || count != present))
        return INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) {
        size_t from = row_of(&args->pairs[i].before), to = row_of(&args->pairs[i].after);
        if (from == CARDS || to == CARDS || becomes[from] || taken[to] ||
            strcmp(rig()->cards[from].model, rig()->cards[to].model) != 0)
            return INVALID_VALUE;
        becomes[from] = to + 1, taken[to] = true;
    }
    memcpy(process->becomes, becomes, sizeof becomes);
    Code code = have_done(process, pid, LOAD);
    set(&process->state, code == SUCCESS ? LOCKED : FAILED);
    return code;
}

API Code cuCheckpointProcessUnlock(int pid, void *args)
{
    PROCESS(pid, LOCKED);
    (void)args;
    set(&process->state, RUNNING);
    return SUCCESS;
}

/* ---- how the bindings find all this ---- */

API Code cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    (void)flags;
    static const char *const suffixes[] = {"_v2", ""};
    char full[128];
    *found = NULL;
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; i < 2 && !*found && library; i++) {
        snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
        *found = dlsym(library, full);
    }
    bool known = *found && (!rig() || (uint64_t)version <= rig()->cuda);
    if (!known)
        *found = NULL;
    if (status)
        *status = known ? 0 : 1;
    return known ? SUCCESS : NOT_FOUND;
}

API Code cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
