/* The part that all libraries have: the state, who lives, and what the tests ordered to go wrong. */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct state *mapped;
static int state_fd = -1;
static char folder[PATH_MAX];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The state lies beside the library itself, whatever links led there: no variable has to reach a process for it to see
 * the same cards as the others. */
static void find_state(void)
{
    Dl_info here;
    char path[PATH_MAX + 16];
    if (!dladdr((void *)find_state, &here) || !realpath(here.dli_fname, folder))
        return;
    *strrchr(folder, '/') = 0;
    snprintf(path, sizeof path, "%s/state", folder);
    state_fd = open(path, O_RDWR | O_CLOEXEC); /* never closed: that would drop the lock of our slot */
    if (state_fd < 0)
        return;
    void *found = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, state_fd, 0);
    if (found != MAP_FAILED)
        mapped = found;
}

struct state *rig(void)
{
    pthread_once(&once, find_state);
    return mapped;
}

int rig_lock(void)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/lock", folder);
    int held = open(path, O_RDWR | O_CLOEXEC); /* a description of its own for each thread, so threads exclude too */
    while (held >= 0 && flock(held, LOCK_EX) != 0 && errno == EINTR)
        ;
    return held;
}

void rig_unlock(int held)
{
    if (held >= 0)
        close(held);
}

uint64_t rig_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void rig_sleep_ms(uint64_t ms)
{
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

uint64_t rig_trouble(const char *call)
{
    struct state *s = rig();
    for (size_t i = 0; s && i < TROUBLES; i++) {
        struct trouble *t = &s->troubles[i];
        if (strcmp(t->call, call) != 0 || (t->pid && t->pid != (uint64_t)getpid()))
            continue;
        uint64_t before = __atomic_fetch_add(&t->met, 1, __ATOMIC_SEQ_CST);
        if (before < t->skip || (t->times && before >= t->skip + t->times))
            continue;
        if (t->kills)
            kill(getpid(), (int)t->kills);
        rig_sleep_ms(t->delay_ms);
        while (__atomic_load_n(&t->hangs, __ATOMIC_SEQ_CST))
            rig_sleep_ms(5);
        if (t->code)
            return t->code;
    }
    return 0;
}

void rig_uuid(const struct card *card, char *text)
{
    char *at = text + sprintf(text, card->parent ? "MIG-" : "GPU-");
    for (size_t i = 0; i < sizeof card->uuid; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", card->uuid[i]);
}

static struct flock slot(size_t process, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)process, .l_len = 1};
}

pid_t rig_pid(size_t process)
{
    struct process *p = &rig()->processes[process];
    if (p->pretended)
        return (pid_t)p->pid;
    struct flock found = slot(process, F_WRLCK);
    if (fcntl(state_fd, F_GETLK, &found) != 0)
        return 0;
    if (found.l_type == F_UNLCK) /* nobody has it; or we do, whom no lock of our own keeps out */
        return p->pid == (uint64_t)getpid() ? getpid() : 0;
    return found.l_pid > 0 ? found.l_pid : -1;
}

size_t rig_enrol(void)
{
    struct state *s = rig();
    size_t found = PROCESSES;
    int held = rig_lock();
    rig_forget_the_dead();
    for (size_t i = 0; i < PROCESSES && found == PROCESSES; i++) {
        struct flock mine = slot(i, F_WRLCK);
        if (s->processes[i].taken || fcntl(state_fd, F_SETLK, &mine) != 0)
            continue;
        memset(&s->processes[i], 0, sizeof s->processes[i]);
        s->processes[i].pid = (uint64_t)getpid();
        s->processes[i].list = s->mps ? SERVES : COMPUTES;
        s->processes[i].taken = 1;
        found = i;
    }
    rig_unlock(held);
    return found;
}

void rig_forget_the_dead(void)
{
    struct state *s = rig();
    for (size_t i = 0; i < PROCESSES; i++) {
        struct process *p = &s->processes[i];
        if (!p->taken || rig_pid(i) != 0)
            continue;
        if (!p->ended_ns)
            p->ended_ns = rig_now_ns();
        if (rig_now_ns() - p->ended_ns < s->lingers_ms * 1000000)
            continue;
        for (size_t at = 0; at < PIECES; at++)
            if (s->pieces[at].bytes && s->pieces[at].process == i)
                s->pieces[at].bytes = 0; /* what it wrote stays on the card, as it does */
        p->taken = 0;
    }
}

uint64_t rig_used_by(size_t process, size_t card)
{
    struct state *s = rig();
    uint64_t bytes = s->processes[process].contexts[card];
    for (size_t at = 0; at < PIECES; at++)
        if (s->pieces[at].bytes && s->pieces[at].process == process && s->pieces[at].card == card)
            bytes += s->pieces[at].bytes;
    return bytes;
}

uint64_t rig_used(size_t card)
{
    struct state *s = rig();
    uint64_t bytes = s->cards[card].idle;
    for (size_t i = 0; i < PROCESSES; i++)
        if (s->processes[i].taken)
            bytes += rig_used_by(i, card);
    return bytes;
}

int rig_open_driver(void)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/control", folder);
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    while (opened >= 0 && flock(opened, LOCK_SH) != 0 && errno == EINTR)
        ;
    return opened;
}

int rig_memory(size_t card)
{
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/card%zu", folder, card);
    return open(path, O_RDWR | O_CLOEXEC);
}
