/* libnvidia-ml.so.1 of the pretended cards. Names, arguments, structures and codes are those of nvml.h; what an answer
 * says is in the state. */
#define _GNU_SOURCE
#include "state.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef unsigned int Code; /* nvmlReturn_t */
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

typedef struct handle *Device;
struct memory { unsigned long long total, free, used; };                           /* nvmlMemory_t */
struct memory_v2 { unsigned int version; unsigned long long total, reserved, free, used; };
struct process_info { unsigned int pid; unsigned long long bytes; unsigned int instance, compute; }; /* _v2_t */
struct utilization { unsigned int gpu, memory; };
struct event { Device device; unsigned long long type, data; unsigned int instance, compute; };
struct event_set { unsigned long long types[CARDS], seen; };

/* What a test compares with the structures of the Python bindings. */
API const struct { const char *name; size_t bytes; } rig_structures[] = {
    {"c_nvmlMemory_t", sizeof(struct memory)},         {"c_nvmlMemory_v2_t", sizeof(struct memory_v2)},
    {"c_nvmlProcessInfo_v2_t", sizeof(struct process_info)}, {"c_nvmlUtilization_t", sizeof(struct utilization)},
    {"c_nvmlEventData_t", sizeof(struct event)},       {NULL, 0},
};
API size_t rig_state_size(void) { return sizeof(struct state); }

static unsigned opened;
static int control = -1;

/* Cards as this machine's NVML counts them: without those that the container has not. */
static int row_of(unsigned int index)
{
    for (size_t i = 0; i < CARDS; i++)
        if (rig()->cards[i].present && !rig()->cards[i].hidden && !rig()->cards[i].parent && index-- == 0)
            return (int)i;
    return -1;
}

static Device device_of(size_t row) { return (Device)(uintptr_t)(0x1000 + row); }

/* The row behind a handle, if the question may be answered at all; else the code to answer. */
static Code ask(const char *call, Device device, struct card **card)
{
    Code code = (Code)rig_trouble(call);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    size_t row = (uintptr_t)device - 0x1000;
    if (row >= CARDS || !rig()->cards[row].present)
        return INVALID_ARGUMENT;
    *card = &rig()->cards[row];
    return (Code)(*card)->code;
}

#define ASK(device)                                                                                                    \
    struct card *card;                                                                                                 \
    Code code = ask(__func__, device, &card);                                                                          \
    if (code != SUCCESS)                                                                                               \
    return code

static Code write_text(char *to, unsigned int length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* ---- the whole ---- */

API Code nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    if (!rig())
        return DRIVER_NOT_LOADED;
    Code code = (Code)rig_trouble(__func__);
    code = code ? code : (Code)rig()->nvml_code;
    if (code == SUCCESS && opened++ == 0)
        control = rig_open_driver();
    return code;
}

API Code nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API Code nvmlShutdown(void)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    if (--opened == 0 && control >= 0)
        close(control), control = -1;
    return SUCCESS;
}

API const char *nvmlErrorString(Code code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

API Code nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    return write_text(version, length, rig()->driver);
}

API Code nvmlDeviceGetCount_v2(unsigned int *count)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    for (*count = 0; row_of(*count) >= 0;)
        ++*count;
    return SUCCESS;
}

API Code nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    int row = row_of(index);
    if (row < 0)
        return INVALID_ARGUMENT;
    *device = device_of((size_t)row);
    return (Code)rig()->cards[row].code;
}

API Code nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    for (size_t row = 0; row < CARDS; row++) {
        struct card *card = &rig()->cards[row];
        char text[NAME];
        rig_uuid(card, text);
        if (card->present && !card->hidden && strcmp(text, uuid) == 0) {
            *device = device_of(row);
            return (Code)card->code;
        }
    }
    return NOT_FOUND;
}

/* ---- a card ---- */

API Code nvmlDeviceGetUUID(Device device, char *uuid, unsigned int length)
{
    ASK(device);
    char text[NAME];
    rig_uuid(card, text);
    return write_text(uuid, length, text);
}

API Code nvmlDeviceGetName(Device device, char *name, unsigned int length)
{
    ASK(device);
    return write_text(name, length, card->model);
}

API Code nvmlDeviceGetMinorNumber(Device device, unsigned int *number)
{
    ASK(device);
    *number = (unsigned int)card->node;
    return card->parent ? INVALID_ARGUMENT : SUCCESS;
}

static uint64_t used_of(const struct card *card)
{
    int held = rig_lock();
    rig_forget_the_dead();
    uint64_t used = rig_used((size_t)(card - rig()->cards));
    rig_unlock(held);
    return used;
}

/* nvml.h: what the driver keeps for itself is part of "used" in the first version, and told apart in the second. */
API Code nvmlDeviceGetMemoryInfo(Device device, struct memory *memory)
{
    ASK(device);
    uint64_t used = used_of(card) + card->reserved;
    *memory = (struct memory){.total = card->memory, .used = used, .free = card->memory - used};
    return SUCCESS;
}

API Code nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *memory)
{
    ASK(device);
    if (memory->version != (sizeof *memory | 2 << 24))
        return ARGUMENT_VERSION_MISMATCH;
    uint64_t used = used_of(card);
    memory->total = card->memory, memory->reserved = card->reserved;
    memory->used = used, memory->free = card->memory - card->reserved - used;
    return SUCCESS;
}

static Code processes_of(const struct card *card, uint64_t list, unsigned int *count, struct process_info *infos)
{
    size_t row = (size_t)(card - rig()->cards), room = *count;
    int held = rig_lock();
    rig_forget_the_dead();
    *count = 0;
    for (size_t i = 0; i < PROCESSES; i++) {
        struct process *p = &rig()->processes[i];
        if (!p->taken || p->list != list || !rig_used_by(i, row))
            continue;
        pid_t pid = rig_pid(i);
        if (pid == 0 || (pid < 0 && rig()->namespaced))
            continue; /* it is dying; or it is of another namespace, whose pids are not told */
        if (*count < room)
            infos[*count] = (struct process_info){
                .pid = pid > 0 ? (unsigned int)pid : (unsigned int)p->pid,
                .bytes = p->untold ? ~0ull : rig_used_by(i, row), /* NVML_VALUE_NOT_AVAILABLE */
                .instance = ~0u, .compute = ~0u,
            };
        ++*count;
    }
    rig_unlock(held);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

API Code nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *count, struct process_info *infos)
{
    ASK(device);
    return processes_of(card, COMPUTES, count, infos);
}

API Code nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned int *count, struct process_info *infos)
{
    ASK(device);
    return processes_of(card, DRAWS, count, infos);
}

API Code nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned int *count, struct process_info *infos)
{
    ASK(device);
    return processes_of(card, SERVES, count, infos);
}

API Code nvmlDeviceGetUtilizationRates(Device device, struct utilization *rates)
{
    ASK(device);
    *rates = (struct utilization){.gpu = (unsigned int)card->busy};
    return SUCCESS;
}

API Code nvmlDeviceGetTotalEccErrors(Device device, unsigned int kind, unsigned int counter, unsigned long long *count)
{
    ASK(device);
    *count = kind == 1 && counter == 0 ? card->uncorrected : 0;
    return SUCCESS;
}

API Code nvmlDeviceGetRetiredPagesPendingStatus(Device device, unsigned int *pending)
{
    ASK(device);
    *pending = card->retiring != 0;
    return SUCCESS;
}

API Code nvmlDeviceGetRemappedRows(Device device, unsigned int *corrected, unsigned int *uncorrected,
                                   unsigned int *pending, unsigned int *failed)
{
    ASK(device);
    *corrected = 0, *uncorrected = (unsigned int)card->remapped;
    *pending = card->remap_pending != 0, *failed = card->remap_failed != 0;
    return SUCCESS;
}

/* ---- parts of a card ---- */

API Code nvmlDeviceGetMigMode(Device device, unsigned int *now, unsigned int *next)
{
    ASK(device);
    if (card->parent)
        return INVALID_ARGUMENT;
    *now = *next = (unsigned int)card->split;
    return SUCCESS;
}

API Code nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned int *count)
{
    ASK(device);
    *count = card->split ? 7 : 0;
    return SUCCESS;
}

API Code nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned int index, Device *instance)
{
    ASK(device);
    for (size_t row = 0; row < CARDS; row++)
        if (rig()->cards[row].present && rig()->cards[row].parent == (size_t)(card - rig()->cards) + 1 && index-- == 0) {
            *instance = device_of(row);
            return SUCCESS;
        }
    return NOT_FOUND;
}

API Code nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device instance, Device *device)
{
    ASK(instance);
    if (!card->parent)
        return INVALID_ARGUMENT;
    *device = device_of(card->parent - 1);
    return SUCCESS;
}

API Code nvmlDeviceGetGpuInstanceId(Device device, unsigned int *number)
{
    ASK(device);
    *number = (unsigned int)(card - rig()->cards);
    return card->parent ? SUCCESS : NOT_SUPPORTED;
}

API Code nvmlDeviceGetComputeInstanceId(Device device, unsigned int *number)
{
    ASK(device);
    *number = 0;
    return card->parent ? SUCCESS : NOT_SUPPORTED;
}

/* ---- settings ---- */

API Code nvmlDeviceGetComputeMode(Device device, unsigned int *mode)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    *mode = (unsigned int)card->compute_mode;
    return SUCCESS;
}

API Code nvmlDeviceSetComputeMode(Device device, unsigned int mode)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    card->compute_mode = mode;
    return SUCCESS;
}

API Code nvmlDeviceGetPersistenceMode(Device device, unsigned int *mode)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    *mode = (unsigned int)card->persistence;
    return SUCCESS;
}

API Code nvmlDeviceSetPersistenceMode(Device device, unsigned int mode)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    card->persistence = mode;
    return SUCCESS;
}

API Code nvmlDeviceGetPowerManagementLimit(Device device, unsigned int *limit)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    *limit = (unsigned int)card->power_mw;
    return SUCCESS;
}

API Code nvmlDeviceSetPowerManagementLimit(Device device, unsigned int limit)
{
    ASK(device);
    if (card->parent)
        return NOT_SUPPORTED;
    card->power_mw = limit;
    return SUCCESS;
}

/* ---- events ---- */

API Code nvmlEventSetCreate(struct event_set **set)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    *set = calloc(1, sizeof **set);
    (*set)->seen = rig()->xids_come; /* only what comes from now on */
    return SUCCESS;
}

API Code nvmlDeviceRegisterEvents(Device device, unsigned long long types, struct event_set *set)
{
    ASK(device);
    set->types[card - rig()->cards] |= types;
    return SUCCESS;
}

API Code nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned int timeout_ms)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !opened)
        return code ? code : UNINITIALIZED;
    const unsigned long long xid_type = 8; /* nvmlEventTypeXidCriticalError */
    for (unsigned int waited = 0;; waited++) {
        while (set->seen < __atomic_load_n(&rig()->xids_come, __ATOMIC_SEQ_CST)) {
            struct xid *xid = &rig()->xids[set->seen++ % XIDS];
            if (!(set->types[xid->card] & xid_type))
                continue;
            *event = (struct event){.device = device_of(xid->card), .type = xid_type, .data = xid->number};
            event->instance = event->compute = ~0u;
            return SUCCESS;
        }
        if (waited >= timeout_ms)
            return TIMEOUT;
        rig_sleep_ms(1);
    }
}

API Code nvmlEventSetFree(struct event_set *set)
{
    Code code = (Code)rig_trouble(__func__);
    free(set);
    return code;
}
