/* A stand-in for the five functions of NVIDIA's cuFile that the engine calls, for `stress.c` and for the tests in Python.
 *
 * It reads files plainly, with a descriptor of its own, and writes to the device at once, beside all streams, as a disk
 * does. `cufile` says what it refuses or does wrongly, and counts. What no caller may do ends the process.
 */
enum { RIGHT_BYTES, NO_BYTES, WRONG_BYTES };

typedef struct {
    int64_t num_open, num_opened, num_reads, read_bytes;
    int64_t max_bytes;   /* that a read brings; 0: all */
    int32_t open_code;    /* of cuFileDriverOpen */
    int32_t refuse_file;  /* number of the file, from 1, that is refused */
    int32_t fail_read;    /* number of the read, from 1, from which on reads fail; 0: none */
    int32_t fail_code;    /* what they return, or, above 0, `errno` */
    int32_t does;         /* RIGHT_BYTES, NO_BYTES, WRONG_BYTES */
    int32_t has_driver;   /* whether nvidia-fs is loaded */
    int32_t hold_read;    /* number of the read that waits until this is 0 */
    int32_t is_held;      /* it waits */
    int32_t device;       /* that must be the current one; -1: any */
    int32_t is_misused;   /* another one was */
    int (*write)(uint64_t target, const void *source, size_t nbytes); /* NULL: `target` is an address of the host */
    int (*current)(int *device);                                      /* of the calling thread */
} cufile_state;
cufile_state cufile = {.has_driver = 1, .device = -1};
static pthread_mutex_t cufile_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
    int fd;
} cufile_file;

static void check_current(void) { /* called with the lock */
    int device = -1;
    if (cufile.device >= 0 && (cufile.current(&device) != 0 || device != cufile.device)) cufile.is_misused = 1;
}

stio_cufile_status cuFileDriverOpen(void) { return (stio_cufile_status){cufile.open_code, 0}; }

stio_cufile_status cuFileDriverGetProperties(void *properties) {
    const unsigned version[2] = {0, cufile.has_driver ? 2 : 0}; /* major, minor */
    memset(properties, 0xFF, 200); /* there is more behind it */
    memcpy(properties, version, sizeof version);
    return (stio_cufile_status){0, 0};
}

stio_cufile_status cuFileHandleRegister(void **handle, stio_cufile_file_description *description) {
    char link[64];
    if (description->kind != 1 || description->operations != NULL) return (stio_cufile_status){5022, 0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", description->of.fd);
    pthread_mutex_lock(&cufile_lock);
    check_current();
    cufile.num_opened += 1;
    const bool is_refused = cufile.num_opened == cufile.refuse_file;
    cufile.num_open += !is_refused;
    pthread_mutex_unlock(&cufile_lock);
    if (is_refused) return (stio_cufile_status){5008, 0};
    cufile_file *const made = malloc(sizeof *made);
    made->fd = open(link, O_RDONLY | O_CLOEXEC);
    *handle = made;
    return (stio_cufile_status){0, 0};
}

void cuFileHandleDeregister(void *handle) {
    cufile_file *const file = handle;
    close(file->fd);
    free(file);
    pthread_mutex_lock(&cufile_lock);
    cufile.num_open -= 1;
    pthread_mutex_unlock(&cufile_lock);
}

ssize_t cuFileRead(void *handle, void *target, size_t nbytes, off_t offset, off_t target_offset) {
    const cufile_file *const file = handle;
    pthread_mutex_lock(&cufile_lock);
    check_current();
    const int64_t number = ++cufile.num_reads;
    const cufile_state now = cufile;
    while (cufile.hold_read > 0 && number >= cufile.hold_read) {
        cufile.is_held = 1;
        pthread_mutex_unlock(&cufile_lock);
        usleep(500);
        pthread_mutex_lock(&cufile_lock);
    }
    pthread_mutex_unlock(&cufile_lock);
    if (now.fail_read > 0 && number >= now.fail_read) {
        if (now.fail_code > 0) errno = now.fail_code;
        return now.fail_code > 0 ? -1 : now.fail_code;
    }
    if (now.max_bytes > 0 && nbytes > (size_t)now.max_bytes) nbytes = (size_t)now.max_bytes;
    char *const bytes = malloc(nbytes + 1);
    const ssize_t count = pread(file->fd, bytes, nbytes, offset);
    if (count > 0 && now.does == WRONG_BYTES) bytes[count - 1] ^= 1;
    int refused = 0;
    if (count > 0 && now.does != NO_BYTES) {
        const uint64_t address = (uint64_t)(uintptr_t)target + (uint64_t)target_offset;
        if (now.write != NULL)
            refused = now.write(address, bytes, (size_t)count);
        else
            memcpy((void *)(uintptr_t)address, bytes, (size_t)count);
    }
    free(bytes);
    pthread_mutex_lock(&cufile_lock);
    cufile.read_bytes += count > 0 ? count : 0;
    pthread_mutex_unlock(&cufile_lock);
    return refused != 0 ? -5013 : count;
}
