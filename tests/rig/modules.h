/* Modules of kernels: what they are called and what they take, read from the module; and the few that compute. */
#ifndef SUBLET_RIG_MODULES_H
#define SUBLET_RIG_MODULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PARAMETERS = 64 };

struct kernel {
    struct kernel *next;
    char name[128];
    size_t count;                       /* of parameters */
    size_t offsets[PARAMETERS], sizes[PARAMETERS];
};

struct module {
    struct kernel *kernels;
    size_t count;
};

/* A cubin (an ELF file) or PTX (text that ends with a NUL); NULL for anything else. "newest" is the newest ABI of cubins
 * that the driver takes, "arch" the card's (90 for 9.0). */
struct module *module_read(const void *image, unsigned newest, unsigned arch);
void module_forget(struct module *module);

struct grid {
    unsigned x, y, blocks_x, blocks_y;  /* threads of a block, and blocks */
};

/* Whether the calling process may write so many bytes there. */
typedef bool (*Reaches)(uint64_t address, uint64_t bytes);

/* Runs a kernel that is known here: those with which devices are tested. 0, or CUDA's code. What is not known does
 * nothing. */
int kernel_run(const struct kernel *kernel, const struct grid *grid, void **arguments, Reaches reaches);

#endif
