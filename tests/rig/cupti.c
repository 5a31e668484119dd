/* libcupti.so.13 of the pretended cards: a record of each kernel that ran, in buffers of the program's.
 *
 * Names and arguments are those of cupti_activity.h (CUPTI 13.4). Of a record only the kind is true; a program that
 * asks for the next record does not see how long one is.
 */
#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int Code; /* CUptiResult */
enum { SUCCESS = 0, INVALID_PARAMETER = 1, INVALID_OPERATION = 7, MAX_LIMIT_REACHED = 12, NOT_INITIALIZED = 15 };
enum { KERNEL = 10 }; /* CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL */

struct record {
    uint32_t kind;
    uint8_t more[204];
};

typedef void Requested(uint8_t **buffer, size_t *size, size_t *records_max);
typedef void Completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static pthread_mutex_t here = PTHREAD_MUTEX_INITIALIZER; /* what follows */
static Requested *requested;
static Completed *completed;
static uint8_t *buffer;
static size_t size, valid;
static bool enabled;

static void give_back(void)
{
    if (buffer)
        completed(NULL, 0, buffer, size, valid);
    buffer = NULL;
}

static void kernel_ran(void)
{
    pthread_mutex_lock(&here);
    size_t records_max = 0;
    if (enabled && !buffer)
        valid = 0, requested(&buffer, &size, &records_max);
    if (enabled && buffer) {
        memcpy(buffer + valid, &(struct record){.kind = KERNEL}, sizeof(struct record));
        valid += sizeof(struct record);
        if (valid + sizeof(struct record) > size)
            give_back();
    }
    pthread_mutex_unlock(&here);
}

API Code cuptiActivityRegisterCallbacks(Requested *request, Completed *complete)
{
    Code code = (Code)rig_trouble(__func__);
    if (code || !request || !complete)
        return code ? code : INVALID_PARAMETER;
    requested = request, completed = complete;
    return SUCCESS;
}

static Code enable(const char *call, uint32_t kind, bool on)
{
    Code code = (Code)rig_trouble(call);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void (*watch)(void (*)(void)) = driver ? (void (*)(void (*)(void)))dlsym(driver, "rig_watch_kernels") : NULL;
    if (code || !watch || kind != KERNEL)
        return code ? code : watch ? INVALID_PARAMETER : NOT_INITIALIZED;
    enabled = on;
    watch(kernel_ran);
    return SUCCESS;
}

API Code cuptiActivityEnable(uint32_t kind) { return enable(__func__, kind, true); }

API Code cuptiActivityDisable(uint32_t kind) { return enable(__func__, kind, false); }

API Code cuptiActivityFlushAll(uint32_t flag)
{
    (void)flag;
    Code code = (Code)rig_trouble(__func__);
    if (code || !completed)
        return code ? code : INVALID_OPERATION;
    pthread_mutex_lock(&here);
    give_back();
    pthread_mutex_unlock(&here);
    return SUCCESS;
}

API Code cuptiActivityGetNextRecord(uint8_t *of, size_t bytes, struct record **record)
{
    struct record *next = *record ? *record + 1 : (struct record *)of;
    if ((uint8_t *)(next + 1) > of + bytes)
        return MAX_LIMIT_REACHED;
    *record = next;
    return SUCCESS;
}
