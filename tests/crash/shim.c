/* Stands between stio and libc, by LD_PRELOAD: counts the calls that a save makes below one directory, and lets the
   n-th fail, fall short, or be the last one of the process. A process arms it for itself, through ctypes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum kind { WRITE = 1, SYNC = 2, RENAME = 4, RESERVE = 8, UNLINK = 16, OPEN = 32, MKDIR = 64 };
enum how { FAIL = 0, FAIL_AFTER = 1, SHORT = 2, KILL = 3, KILL_AFTER = 4 };

#define PATH_BYTES 4096
#define PAGE_BYTES 4096

static char prefix[PATH_BYTES];
static atomic_int kinds;  /* 0: not armed */
static atomic_long seen;
static long nth;
static int number, how, lasting;

/* Watches calls of these kinds on paths that begin with `path`; the n-th (and, lasting, all later ones) is hit. */
void shim_arm(const char *path, int wanted, long n, int error, int manner, int goes_on)
{
    atomic_store(&kinds, 0);
    snprintf(prefix, sizeof prefix, "%s", path);
    nth = n;
    number = error;
    how = manner;
    lasting = goes_on;
    atomic_store(&seen, 0);
    atomic_store(&kinds, wanted);
}

/* Lets everything pass again; returns how many calls there were. */
long shim_disarm(void)
{
    atomic_store(&kinds, 0);
    return atomic_load(&seen);
}

static int hit_path(const char *path)
{
    if (strncmp(path, prefix, strlen(prefix)) != 0)
        return 0;
    long n = atomic_fetch_add(&seen, 1) + 1;
    return lasting ? n >= nth : n == nth;
}

static int name_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_BYTES - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return 1;
}

static int hit_fd(int kind, int fd)
{
    char path[PATH_BYTES];
    int before = errno;
    int hit = (atomic_load(&kinds) & kind) && name_of(fd, path) && hit_path(path);
    errno = before;
    return hit;
}

static int hit_at(int kind, int dir_fd, const char *name)
{
    char path[2 * PATH_BYTES];
    int before = errno, hit = 0;
    if (atomic_load(&kinds) & kind) {
        if (name[0] == '/') {
            hit = hit_path(name);
        } else if (dir_fd != AT_FDCWD && name_of(dir_fd, path)) {
            strncat(path, "/", 2);
            strncat(path, name, PATH_BYTES - 1);
            hit = hit_path(path);
        }
    }
    errno = before;
    return hit;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define BEFORE(hit) \
    if (hit && how == KILL) \
        kill(getpid(), SIGKILL); \
    if (hit && how == FAIL) { \
        errno = number; \
        return -1; \
    }

#define AFTER(hit, result) \
    if (hit && how == KILL_AFTER) \
        kill(getpid(), SIGKILL); \
    if (hit && how == FAIL_AFTER) { \
        errno = number; \
        return -1; \
    } \
    return result

#define CALL(hit, type, ...) \
    int is_hit = hit; \
    BEFORE(is_hit) \
    type result = real(__VA_ARGS__); \
    AFTER(is_hit, result)

/* Direct I/O takes whole pages only. */
static size_t shorter(size_t nbytes)
{
    return nbytes >= 2 * PAGE_BYTES ? nbytes / 2 / PAGE_BYTES * PAGE_BYTES : nbytes > 1 ? nbytes / 2 : nbytes;
}

#define PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t nbytes, offset_type offset) \
    { \
        REAL(name); \
        int is_hit = hit_fd(WRITE, fd); \
        if (is_hit && how == SHORT) \
            nbytes = shorter(nbytes); \
        BEFORE(is_hit) \
        ssize_t result = real(fd, data, nbytes, offset); \
        AFTER(is_hit, result); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t nbytes)
{
    REAL(write);
    int is_hit = hit_fd(WRITE, fd);
    if (is_hit && how == SHORT)
        nbytes = shorter(nbytes);
    BEFORE(is_hit)
    ssize_t result = real(fd, data, nbytes);
    AFTER(is_hit, result);
}

int fsync(int fd) { REAL(fsync); CALL(hit_fd(SYNC, fd), int, fd); }
int fdatasync(int fd) { REAL(fdatasync); CALL(hit_fd(SYNC, fd), int, fd); }

#define FALLOCATE(name, offset_type) \
    int name(int fd, int mode, offset_type offset, offset_type nbytes) \
    { \
        REAL(name); \
        CALL(hit_fd(RESERVE, fd), int, fd, mode, offset, nbytes); \
    }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)

#define FTRUNCATE(name, offset_type) \
    int name(int fd, offset_type nbytes) \
    { \
        REAL(name); \
        CALL(hit_fd(RESERVE, fd), int, fd, nbytes); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

int rename(const char *from, const char *to)
{
    REAL(rename);
    CALL(hit_at(RENAME, AT_FDCWD, to), int, from, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    REAL(renameat);
    CALL(hit_at(RENAME, to_fd, to), int, from_fd, from, to_fd, to);
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    REAL(renameat2);
    CALL(hit_at(RENAME, to_fd, to), int, from_fd, from, to_fd, to, flags);
}

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags)
{
    REAL(linkat);
    CALL(hit_at(RENAME, to_fd, to), int, from_fd, from, to_fd, to, flags);
}

int unlink(const char *name) { REAL(unlink); CALL(hit_at(UNLINK, AT_FDCWD, name), int, name); }
int rmdir(const char *name) { REAL(rmdir); CALL(hit_at(UNLINK, AT_FDCWD, name), int, name); }

int unlinkat(int dir_fd, const char *name, int flags)
{
    REAL(unlinkat);
    CALL(hit_at(UNLINK, dir_fd, name), int, dir_fd, name, flags);
}

int mkdir(const char *name, mode_t mode) { REAL(mkdir); CALL(hit_at(MKDIR, AT_FDCWD, name), int, name, mode); }

int mkdirat(int dir_fd, const char *name, mode_t mode)
{
    REAL(mkdirat);
    CALL(hit_at(MKDIR, dir_fd, name), int, dir_fd, name, mode);
}

#define OPEN_AT(function) \
    int function(int dir_fd, const char *name, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        REAL(function); \
        CALL(hit_at(OPEN, dir_fd, name), int, dir_fd, name, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define OPEN_PATH(function) \
    int function(const char *name, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        REAL(function); \
        CALL(hit_at(OPEN, AT_FDCWD, name), int, name, flags, mode); \
    }
OPEN_PATH(open)
OPEN_PATH(open64)
