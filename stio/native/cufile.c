/* cuFile, NVIDIA's library for GPUDirect Storage: reads from a disk into the memory of a device.
 *
 * The library is found at run time. It takes each offset, length and address; what is not aligned to pages it reads
 * through memory of its own. A read blocks, and no stream orders it: the caller waits until nothing that is queued uses
 * the memory. Where the driver nvidia-fs is not loaded, cuFile may read through host memory (compatibility mode).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define ALREADY_OPEN 5026 /* another part of the process uses cuFile too */
#define IS_DESCRIPTOR 1

struct stio_cufile_file {
    const stio_cufile *library;
    void *handle;
    stio_failure failure; /* the first one, guarded by `engine.lock` */
};

static const struct {
    int code;
    const char *text;
} texts[] = {
    {5001, "the driver nvidia-fs is not loaded, and cuFile's compatibility mode is off"},
    {5007, "this machine does not support it"},
    {5008, "the filesystem of this file does not support it"},
    {5009, "this device does not support it"},
    {5020, "the filesystem of this file has no direct I/O"},
    {5025, "no access to the driver nvidia-fs"},
    {5030, "an internal error of cuFile; a container needs /run/udev"},
    {5034, "cuFile's configuration switches it off for this file"},
};

static void text_of(int code, int driver_code, char text[STIO_TEXT_BYTES]) {
    const char *found = NULL;
    for (size_t k = 0; k < sizeof texts / sizeof *texts; ++k)
        if (texts[k].code == code) found = texts[k].text;
    if (driver_code != 0)
        snprintf(text, STIO_TEXT_BYTES, "cuFile's error %d, CUDA's error %d", code, driver_code);
    else
        snprintf(text, STIO_TEXT_BYTES, "cuFile's error %d%s%s", code, found != NULL ? ": " : "", found != NULL ? found : "");
}

const stio_cufile *stio_cufile_load(const char *path, char why[STIO_TEXT_BYTES]) {
    stio_cufile *const made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    const stio_symbol symbols[] = {
        {"cuFileDriverOpen", &made->driver_open},
        {"cuFileDriverGetProperties", &made->get_properties},
        {"cuFileHandleRegister", &made->handle_register},
        {"cuFileHandleDeregister", &made->handle_deregister},
        {"cuFileRead", &made->read},
    };
    if (stio_library_of(path, symbols, sizeof symbols / sizeof *symbols, why) != NULL) return made;
    free(made);
    return NULL;
}

stio_cufile_file *stio_cufile_open(const stio_cufile *library, int fd, int *has_driver, char why[STIO_TEXT_BYTES]) {
    snprintf(why, STIO_TEXT_BYTES, "no memory");
    stio_cufile_file *const made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    made->library = library;
    union { /* the first fields are the version of nvidia-fs; a later cuFile may have more fields at the end */
        struct {
            unsigned major, minor;
        } version;
        char room[1024];
    } properties = {.version = {0, 0}};
    stio_cufile_file_description description = {.kind = IS_DESCRIPTOR, .of = {.fd = fd}};
    stio_cufile_status status = library->driver_open();
    if (status.code == ALREADY_OPEN) status = (stio_cufile_status){0, 0};
    if (status.code == 0) status = library->get_properties(&properties);
    if (status.code == 0) status = library->handle_register(&made->handle, &description);
    *has_driver = properties.version.major != 0 || properties.version.minor != 0;
    if (status.code == 0) return made;
    text_of(status.code, status.driver_code, why);
    free(made);
    return NULL;
}

int stio_cufile_failed(stio_cufile_file *file, stio_failure *failure) {
    pthread_mutex_lock(&engine.lock);
    *failure = file->failure;
    pthread_mutex_unlock(&engine.lock);
    return failure->kind != 0;
}

void stio_cufile_close(stio_cufile_file *file) {
    file->library->handle_deregister(file->handle);
    free(file);
}

bool stio_cufile_read(const chunk *one) {
    const stio_range *const range = one->ranges;
    stio_cufile_file *const file = (stio_cufile_file *)(uintptr_t)range->source;
    stio_failure failure = {.offset = one->begin};
    bool ok = stio_make_current(range->ring->driver, range->ring->context, &failure);
    while (ok && failure.offset < one->end) {
        failure.nbytes = (uint64_t)(one->end - failure.offset);
        const ssize_t count = file->library->read(
            file->handle, (void *)(uintptr_t)range->target, (size_t)failure.nbytes, failure.offset,
            failure.offset - range->offset);
        const int reason = errno;
        if (count == -1 && reason == EINTR) continue;
        if (count > 0) {
            failure.offset += count;
            continue;
        }
        ok = false;
        failure.kind = count == 0 ? STIO_TRUNCATED : count == -1 ? STIO_ERRNO : STIO_DRIVER;
        failure.code = count == -1 ? reason : (int)-count;
        if (failure.kind == STIO_DRIVER) text_of(failure.code, 0, failure.text);
    }
    if (ok) return true;
    pthread_mutex_lock(&engine.lock);
    if (file->failure.kind == 0) file->failure = failure;
    pthread_mutex_unlock(&engine.lock);
    return false;
}
