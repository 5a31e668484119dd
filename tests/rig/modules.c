#define _GNU_SOURCE
#include "modules.h"

#include <ctype.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ILLEGAL_ADDRESS = 700 };
enum { CUDA_MACHINE = 190, PARAMETER_INFO = 0x17, PARAMETER_INFO_V2 = 0x45, WITH_SIZE = 4 };

static struct kernel *add(struct module *module, const char *name, size_t length)
{
    struct kernel *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%.*s", (int)length, name);
    made->next = module->kernels;
    module->kernels = made;
    module->count++;
    return made;
}

/* ---- cubins ----
 *
 * The code of a kernel lies in the section ".text.NAME", what it takes in ".nv.info.NAME": records of a format, an
 * attribute and 16 bits, which are a size if the format says that data follows. A parameter's record has its ordinal
 * and offset in the second word, and its size in the upper bits of the third.
 */
static void read_parameters(struct kernel *kernel, const uint8_t *at, const uint8_t *end)
{
    while (at + 4 <= end) {
        uint16_t size;
        memcpy(&size, at + 2, sizeof size);
        bool has_data = at[0] == WITH_SIZE;
        if (has_data && (at[1] == PARAMETER_INFO || at[1] == PARAMETER_INFO_V2) && size >= 12 && at + 4 + size <= end) {
            uint16_t ordinal, offset;
            uint32_t last;
            memcpy(&ordinal, at + 8, sizeof ordinal);
            memcpy(&offset, at + 10, sizeof offset);
            memcpy(&last, at + 12, sizeof last);
            if (ordinal < PARAMETERS) {
                kernel->offsets[ordinal] = offset;
                kernel->sizes[ordinal] = last >> 18;
                if (kernel->count <= ordinal)
                    kernel->count = ordinal + 1u;
            }
        }
        at += 4 + (has_data ? size : 0);
    }
}

/* Where a cubin says for which architecture it is: with ABI 7 in the lowest byte of its flags, with 8 in the next one
 * (of those that NVRTC 12.9 and 13.5 make). It runs on those of the same major number and no smaller minor one: CUDA C++
 * Programming Guide, binary compatibility. */
static bool runs_on(const Elf64_Ehdr *head, unsigned arch)
{
    unsigned made_for = head->e_flags >> (head->e_ident[EI_ABIVERSION] >= 8 ? 8 : 0) & 0xff;
    return made_for / 10 == arch / 10 && made_for <= arch;
}

static bool read_cubin(struct module *module, const uint8_t *image, unsigned newest, unsigned arch)
{
    Elf64_Ehdr head;
    memcpy(&head, image, sizeof head);
    if (head.e_machine != CUDA_MACHINE || head.e_ident[EI_ABIVERSION] > newest || !runs_on(&head, arch))
        return false;
    const Elf64_Shdr *sections = (const void *)(image + head.e_shoff);
    const char *names = (const char *)image + sections[head.e_shstrndx].sh_offset;
    for (unsigned i = 0; i < head.e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (strncmp(name, ".text.", 6) != 0)
            continue;
        struct kernel *kernel = add(module, name + 6, strlen(name + 6));
        for (unsigned j = 0; j < head.e_shnum; j++) {
            const char *other = names + sections[j].sh_name;
            const uint8_t *data = image + sections[j].sh_offset;
            if (strncmp(other, ".nv.info.", 9) == 0 && strcmp(other + 9, name + 6) == 0)
                read_parameters(kernel, data, data + sections[j].sh_size);
        }
    }
    return true;
}

/* ---- PTX: ".visible .entry NAME( .param .u64 …, .param .b8 …[16] )" ---- */

static size_t size_of_type(const char *type)
{
    return type[0] == '8' ? 1 : strncmp(type, "16", 2) == 0 ? 2 : strncmp(type, "64", 2) == 0 ? 8 : 4;
}

static bool read_ptx(struct module *module, const char *text)
{
    if (!strstr(text, ".version") || !strstr(text, ".target"))
        return false;
    for (const char *at = text; (at = strstr(at, ".entry"));) {
        at += strlen(".entry");
        at += strspn(at, " \t\n");
        size_t length = strcspn(at, " \t\n(");
        struct kernel *kernel = add(module, at, length);
        const char *open = strchr(at, '('), *close = open ? strchr(open, ')') : NULL;
        size_t offset = 0;
        for (const char *p = open; p && close && (p = strstr(p, ".param")) && p < close && kernel->count < PARAMETERS;) {
            const char *last = p, *word = p + strlen(".param");
            while (word < close && *word != ',') /* the type is the last word that begins with a dot */
                last = *word == '.' && isalpha((unsigned char)word[1]) ? word : last, word++;
            const char *many = memchr(last, '[', (size_t)(word - last));
            size_t size = size_of_type(last + 2) * (many ? strtoul(many + 1, NULL, 10) : 1);
            size_t align = size >= 8 ? 8 : size ? size : 1;
            offset = (offset + align - 1) / align * align;
            kernel->offsets[kernel->count] = offset;
            kernel->sizes[kernel->count++] = size;
            offset += size;
            p = word;
        }
    }
    return true;
}

struct module *module_read(const void *image, unsigned newest, unsigned arch)
{
    struct module *made = calloc(1, sizeof *made);
    bool is_elf = memcmp(image, ELFMAG, SELFMAG) == 0;
    if (is_elf ? read_cubin(made, image, newest, arch) : read_ptx(made, image))
        return made;
    module_forget(made);
    return NULL;
}

void module_forget(struct module *module)
{
    while (module->kernels) {
        struct kernel *first = module->kernels;
        module->kernels = first->next;
        free(first);
    }
    free(module);
}

/* ---- the kernels with which devices are tested (sublet.testing.device_conformance, tests/gpu/gpus.py), and the one of a
 * training job (test_office.py) ---- */

#define TAKE(type, name, index)                                                                                        \
    type name;                                                                                                         \
    memcpy(&name, arguments[index], sizeof name)
#define AT(type, address) ((type *)(uintptr_t)(address))

int kernel_run(const struct kernel *kernel, const struct grid *grid, void **arguments, Reaches reaches)
{
    uint64_t width = (uint64_t)grid->x * grid->blocks_x, height = (uint64_t)grid->y * grid->blocks_y;
    if (strcmp(kernel->name, "axpy") == 0) {
        TAKE(float, a, 0);
        TAKE(uint64_t, x, 1);
        TAKE(uint64_t, y, 2);
        TAKE(uint32_t, n, 3);
        n = n < width ? n : (uint32_t)width;
        if (!reaches(x, n * 4ull) || !reaches(y, n * 4ull))
            return ILLEGAL_ADDRESS;
        for (uint32_t i = 0; i < n; i++) {
            volatile float product = a * AT(float, x)[i]; /* rounded for itself, as the kernel has it */
            AT(float, y)[i] = product + AT(float, y)[i];
        }
    } else if (strcmp(kernel->name, "step") == 0) {
        TAKE(uint64_t, x, 0);
        TAKE(uint32_t, n, 1);
        TAKE(uint32_t, a, 2);
        n = n < width ? n : (uint32_t)width;
        if (!reaches(x, n * 4ull))
            return ILLEGAL_ADDRESS;
        for (uint32_t i = 0; i < n; i++)
            AT(uint32_t, x)[i] = AT(uint32_t, x)[i] * a + i;
    } else if (strcmp(kernel->name, "train_step") == 0) { /* (step, bytes of the state, state and then the batch) */
        TAKE(uint32_t, length, 1);
        TAKE(uint64_t, x, 2);
        uint32_t n = length / 4 < width ? length / 4 : (uint32_t)width;
        if (!reaches(x, 2ull * length))
            return ILLEGAL_ADDRESS;
        for (uint32_t i = 0; i < n; i++)
            AT(float, x)[i] = (AT(float, x)[i] + AT(float, x)[length / 4 + i]) * 0.5f;
    } else if (strcmp(kernel->name, "places") == 0) {
        TAKE(uint64_t, hits, 0);
        TAKE(uint32_t, row, 1);
        if (!reaches(hits, 4 * ((width - 1) * row + height)))
            return ILLEGAL_ADDRESS;
        for (uint64_t i = 0; i < width; i++)
            for (uint64_t j = 0; j < height; j++)
                AT(uint32_t, hits)[i * row + j] += (uint32_t)(i * row + j);
    } else if (strcmp(kernel->name, "numbers") == 0) {
        TAKE(uint32_t, a, 0);
        TAKE(uint64_t, b, 1);
        TAKE(int32_t, c, 2);
        TAKE(int64_t, d, 3);
        TAKE(float, e, 4);
        TAKE(double, f, 5);
        TAKE(uint64_t, whole, 6);
        TAKE(uint64_t, parts, 7);
        if (!reaches(whole, 32) || !reaches(parts, 16))
            return ILLEGAL_ADDRESS;
        memcpy(AT(void, whole), (uint64_t[]){a, b, (uint64_t)(int64_t)c, (uint64_t)d}, 32);
        memcpy(AT(void, parts), (double[]){(double)e, f}, 16);
    } else if (strcmp(kernel->name, "first_word") == 0 || strcmp(kernel->name, "fault") == 0) {
        TAKE(uint64_t, p, 0);
        if (!reaches(p, 8))
            return ILLEGAL_ADDRESS;
        *AT(uint64_t, p) = kernel->name[0] == 'f' && kernel->name[1] == 'i' ? 7 : 1;
    }
    return 0;
}
