/* The pretended cards of one machine, in one file that every process maps.
 *
 * All libraries (cuda.c, nvml.c, cupti.c) and the tests (rig.py) read and write it. Every number takes 8 bytes, so that C and
 * Python agree on the layout without a word about padding; rig.py has the same fields in the same order, and a test
 * compares the sizes. Zero is a valid start for everything.
 *
 * A process on the cards holds a POSIX lock on the byte of its slot. The kernel drops that lock at the moment at which
 * it would close the device files of a dying process, and tells the pid of its owner as the reader's own pid namespace
 * numbers it. So neither a death nor a foreign namespace has to be pretended.
 */
#ifndef SUBLET_RIG_STATE_H
#define SUBLET_RIG_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { CARDS = 16, PROCESSES = 64, PIECES = 4096, TROUBLES = 32, XIDS = 64, NAME = 64 };

/* CUprocessState, in the order of the bindings. */
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };

/* What another process asks of the thread that each CUDA process has for this. */
enum { NOTHING, SAVE, LOAD };

enum { COMPUTES, DRAWS, SERVES };    /* which of NVML's three lists of processes shows it */

struct card {
    uint8_t uuid[16];
    char model[NAME];
    uint64_t present;           /* 0: this row is not used */
    uint64_t hidden;            /* the machine has it, and this container does not */
    uint64_t split;             /* in MIG mode: only its parts can be used */
    uint64_t parent;            /* 0: a whole card; else the row of the card that it is a part of, plus one */
    uint64_t memory;            /* bytes, as NVML says "total" */
    uint64_t reserved;          /* bytes the driver keeps for itself and never lends */
    uint64_t idle;              /* bytes in use with no process on it */
    uint64_t context;           /* bytes a context takes */
    uint64_t major, minor;      /* compute capability */
    uint64_t node;              /* N of /dev/nvidiaN */
    uint64_t code;              /* what NVML answers to every question about this card; 0: the answer */
    uint64_t compute_mode, persistence, power_mw;
    uint64_t uncorrected;       /* volatile, uncorrected memory errors */
    uint64_t retiring;          /* pages to be retired at the next reset */
    uint64_t remapped, remap_pending, remap_failed;
    uint64_t busy;              /* percent */
};

struct process {
    uint64_t taken;             /* 0: this row is not used */
    uint64_t pid;               /* as it numbers itself; the lock tells how others do */
    uint64_t pretended;         /* a row of the personality, such as a desktop: no process, no lock */
    uint64_t list;              /* COMPUTES, DRAWS or SERVES */
    uint64_t untold;            /* NVML does not tell how much it has */
    uint64_t ended_ns;          /* when its lock was first seen to be gone */
    uint64_t contexts[CARDS];   /* bytes its context takes on each card; 0: none there */
    uint64_t state;             /* RUNNING to FAILED */
    uint64_t order;             /* NOTHING, SAVE or LOAD */
    uint64_t outcome;           /* the code that the order came to */
    uint64_t calls;             /* under way; a lock waits for them */
    uint64_t launches;
    uint64_t becomes[CARDS];    /* LOAD: for each card the one it is now, plus one; 0: the same */
};

struct piece {
    uint64_t bytes;             /* 0: this row is not used */
    uint64_t card, process;     /* rows */
    uint64_t offset;            /* where it lies on the card */
    uint64_t address;           /* where its process has it mapped */
};

struct trouble {
    char call[NAME];            /* the name of an entry point; "": this row is not used */
    uint64_t code;              /* answered instead of doing it; 0: done after all */
    uint64_t delay_ms;
    uint64_t hangs;             /* it does not return while this is set */
    uint64_t kills;             /* the signal that ends the caller */
    uint64_t pid;               /* only for this caller; 0: any */
    uint64_t skip;              /* so many calls go well before */
    uint64_t times;             /* so many calls go wrong; 0: all */
    uint64_t met;               /* counted by the libraries: calls that came here */
};

struct xid {
    uint64_t card, number;
};

struct state {
    uint64_t size;              /* of this structure: a test compares it */
    char driver[NAME];          /* "570.86.15" */
    uint64_t cuda;              /* 12080 */
    uint64_t nodes;             /* cuInit opens /dev/nvidia*, and has only those cards that it may open */
    uint64_t lingers_ms;        /* what a dead process had stays in use for so long */
    uint64_t init_code;         /* what cuInit answers */
    uint64_t nvml_code;         /* what nvmlInit answers */
    uint64_t namespaced;        /* 0: NVML tells every pid; 1: only those that the asker's namespace has */
    uint64_t mps;               /* an MPS server: all that compute are its clients, and are not suspended */
    uint64_t xids_come;         /* how many Xids there were so far; the row is the number modulo XIDS */
    struct card cards[CARDS];
    struct process processes[PROCESSES];
    struct piece pieces[PIECES];
    struct trouble troubles[TROUBLES];
    struct xid xids[XIDS];
};

/* The mapped state; NULL where there is none beside the library, which is then a driver that is not loaded. */
struct state *rig(void);

/* One process at a time changes the tables. Falls with the process that holds it. */
int rig_lock(void);
void rig_unlock(int held);

/* What the tests ordered for this entry point: waits, never returns, ends the caller, or answers a code. */
uint64_t rig_trouble(const char *call);

/* Under the lock: forgets what dead processes had, once it has lingered for long enough. */
void rig_forget_the_dead(void);

/* Under the lock: bytes in use on a card, by everybody or by one process. */
uint64_t rig_used(size_t card);
uint64_t rig_used_by(size_t process, size_t card);

/* The pid of a process as the caller numbers it; 0 if it is dead, -1 if its namespace is not the caller's. */
pid_t rig_pid(size_t process);

/* The UUID of a card or a part of one, as NVML writes it: NAME bytes. */
void rig_uuid(const struct card *card, char *text);

/* A row for this process, held until it dies; PROCESSES if there is none left. */
size_t rig_enrol(void);

/* The driver's file, opened, as /dev/nvidiactl: no card is reset while a process has it. -1: there is none. */
int rig_open_driver(void);

/* The memory of a card, opened anew. */
int rig_memory(size_t card);

uint64_t rig_now_ns(void);
void rig_sleep_ms(uint64_t ms);

#endif
