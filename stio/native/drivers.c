/* Drivers of devices, found at run time in libraries that the program has loaded already. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

#define NOT_READY 600 /* cudaErrorNotReady, hipErrorNotReady */

void *stio_library_of(const char *name, const stio_symbol *symbols, size_t num_symbols, char why[STIO_TEXT_BYTES]) {
    void *const library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        const char *const reason = dlerror();
        snprintf(why, STIO_TEXT_BYTES, "%s", reason != NULL ? reason : name);
        return NULL;
    }
    for (size_t k = 0; k < num_symbols; ++k) {
        void *const found = dlsym(library, symbols[k].name);
        if (found == NULL) {
            snprintf(why, STIO_TEXT_BYTES, "%s has no function %s", name, symbols[k].name);
            return NULL;
        }
        memcpy(symbols[k].into, &found, sizeof found); /* ISO C has no cast from an object's address to a function's */
    }
    return library;
}

/* CUDA: the driver's functions have the shapes of the table. */

static stio_driver cuda;
static int (*cuda_init)(unsigned flags), (*cuda_device)(int *device, int ordinal);
static int (*cuda_retain)(void **context, int device);

static const stio_driver *open_cuda(int ordinal, void **context, char why[STIO_TEXT_BYTES]) {
    const stio_symbol symbols[] = {
        {"cuInit", &cuda_init},
        {"cuDeviceGet", &cuda_device},
        {"cuDevicePrimaryCtxRetain", &cuda_retain},
        {"cuCtxSetCurrent", &cuda.make_current},
        {"cuMemcpyHtoDAsync_v2", &cuda.copy},
        {"cuMemcpyDtoHAsync_v2", &cuda.copy_to_host},
        {"cuMemcpyDtoDAsync_v2", &cuda.copy_on_device},
        {"cuEventCreate", &cuda.event_create},
        {"cuEventRecord", &cuda.event_record},
        {"cuEventQuery", &cuda.event_query},
        {"cuEventDestroy_v2", &cuda.event_destroy},
        {"cuMemHostRegister_v2", &cuda.pin},
        {"cuMemHostUnregister", &cuda.unpin},
        {"cuGetErrorString", &cuda.error_text},
        {"cuThreadExchangeStreamCaptureMode", &cuda.exchange_capture_mode},
    };
    /* Once: threads may use the table of another device already. */
    if (cuda.not_ready == 0 && stio_library_of("libcuda.so.1", symbols, sizeof symbols / sizeof *symbols, why) == NULL)
        return NULL;
    cuda.not_ready = NOT_READY;
    int device = 0;
    int code = cuda_init(0);
    if (code == 0) code = cuda_device(&device, ordinal);
    if (code == 0) code = cuda_retain(context, device); /* the context that torch uses; it is kept */
    if (code == 0) return &cuda;
    const char *text = NULL;
    cuda.error_text(code, &text);
    snprintf(why, STIO_TEXT_BYTES, "CUDA's driver: %s", text != NULL ? text : "unknown error");
    return NULL;
}

/* HIP: a thread's device is chosen by its number, and texts of errors are returned. Not tried on a device. */

static stio_driver hip;
static int (*hip_set_device)(int device);
static const char *(*hip_error_string)(int code);

static int hip_make_current(void *context) { return hip_set_device((int)(intptr_t)context - 1); }

static int hip_error_text(int code, const char **text) {
    *text = hip_error_string(code);
    return 0;
}

static const stio_driver *open_hip(int ordinal, void **context, char why[STIO_TEXT_BYTES]) {
    const stio_symbol symbols[] = {
        {"hipSetDevice", &hip_set_device},
        {"hipMemcpyHtoDAsync", &hip.copy},
        {"hipMemcpyDtoHAsync", &hip.copy_to_host},
        {"hipMemcpyDtoDAsync", &hip.copy_on_device},
        {"hipEventCreateWithFlags", &hip.event_create},
        {"hipEventRecord", &hip.event_record},
        {"hipEventQuery", &hip.event_query},
        {"hipEventDestroy", &hip.event_destroy},
        {"hipHostRegister", &hip.pin},
        {"hipHostUnregister", &hip.unpin},
        {"hipGetErrorString", &hip_error_string},
    };
    if (hip.not_ready == 0 && stio_library_of("libamdhip64.so", symbols, sizeof symbols / sizeof *symbols, why) == NULL)
        return NULL;
    hip.make_current = hip_make_current;
    hip.error_text = hip_error_text;
    hip.not_ready = NOT_READY;
    *context = (void *)(intptr_t)(ordinal + 1);
    return &hip;
}

const stio_driver *stio_driver_open(const char *kind, int device, void **context, char why[STIO_TEXT_BYTES]) {
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    const stio_driver *found = NULL;
    snprintf(why, STIO_TEXT_BYTES, "there is no driver of the kind %s", kind);
    pthread_mutex_lock(&opening);
    if (strcmp(kind, "cuda") == 0) found = open_cuda(device, context, why);
    if (strcmp(kind, "hip") == 0) found = open_hip(device, context, why);
    pthread_mutex_unlock(&opening);
    return found;
}

int stio_copies_queue(const stio_driver *driver, void *context, void *stream, int to_host, const stio_range *ranges,
                      size_t num_ranges, stio_failure *failure) {
    int code = driver->make_current(context);
    for (const stio_range *one = ranges; one < ranges + num_ranges && code == 0; ++one) {
        if (one->nbytes == 0) continue;
        code = to_host ? driver->copy_to_host((void *)(uintptr_t)one->target, one->source, one->nbytes, stream)
                       : driver->copy_on_device(one->target, one->source, one->nbytes, stream);
    }
    if (code == 0) return 0;
    stio_driver_failed(driver, code, failure);
    return -1;
}
