/* Library for LD_PRELOAD: counts calls of moerl's own processes, and fails the n-th of one kind, whichever process comes to it.
 *
 * MOERL_FAULT_FILE holds the counters, the kind and number to fail, and what was failed, in memory that all processes share. Of a run's
 * processes those are moerl's whose words have "moerl." (the command, servers, what they are forked from) or are a worker of Ray's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum kind { WRITE, FSYNC, RENAME, CONNECT, RECV, SEND, MMAP, NUM_KINDS };

struct shared {
    _Atomic long count[NUM_KINDS];
    long kind, at; /* the `at`-th call of `kind` fails, counted from 1; 0: none does */
    long failed_pid;
    char failed[200]; /* words of its process */
    char target[200]; /* what its file descriptor is */
};

static struct shared *state;

static void words_of_process(char *words, size_t size) {
    int file = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    long read = file < 0 ? 0 : syscall(SYS_read, file, words, size - 1);
    if (file >= 0) syscall(SYS_close, file);
    if (read < 0) read = 0;
    for (long i = 0; i < read; i++)
        if (words[i] == 0) words[i] = ' ';
    words[read] = 0;
}

__attribute__((constructor)) static void begin(void) {
    char words[8192];
    const char *path = getenv("MOERL_FAULT_FILE");
    words_of_process(words, sizeof words);
    if (!path || !(strstr(words, "moerl.") || strstr(words, "-m moerl ") || strstr(words, "default_worker.py"))) return;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *memory = (void *)syscall(SYS_mmap, 0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (memory != MAP_FAILED) state = memory;
}

/* Is this call the one that fails? */
static int fails(enum kind kind, int descriptor) {
    if (!state) return 0;
    long number = atomic_fetch_add(&state->count[kind], 1) + 1;
    if (state->kind != kind || state->at != number) return 0;
    int before = errno;
    char link[40];
    state->failed_pid = getpid();
    words_of_process(state->failed, sizeof state->failed);
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (descriptor >= 0) syscall(SYS_readlinkat, AT_FDCWD, link, state->target, sizeof state->target - 1);
    errno = before;
    return 1;
}

static int is_file(int descriptor) {
    struct stat found;
    return fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRAP(result, name, arguments, passed, kind, descriptor, error, failed) \
    result name arguments { \
        REAL(name); \
        if (fails(kind, descriptor)) { \
            errno = error; \
            return failed; \
        } \
        return real passed; \
    }

WRAP(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), WRITE, fd, is_file(fd) ? ENOSPC : EPIPE, -1)
WRAP(int, fsync, (int fd), (fd), FSYNC, fd, EIO, -1)
WRAP(int, fdatasync, (int fd), (fd), FSYNC, fd, EIO, -1)
WRAP(int, rename, (const char *from, const char *to), (from, to), RENAME, -1, EIO, -1)
WRAP(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), RENAME, -1, EIO, -1)
WRAP(int, connect, (int fd, const struct sockaddr *to, socklen_t size), (fd, to, size), CONNECT, fd, ECONNREFUSED, -1)
WRAP(ssize_t, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags), RECV, fd, ECONNRESET, -1)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), RECV, fd, ECONNRESET, -1)
WRAP(ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags), SEND, fd, EPIPE, -1)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags), SEND, fd, EPIPE, -1)
WRAP(void *, mmap, (void *at, size_t size, int protection, int flags, int fd, off_t offset), (at, size, protection, flags, fd, offset), MMAP,
     fd, ENOMEM, MAP_FAILED)
WRAP(void *, mmap64, (void *at, size_t size, int protection, int flags, int fd, off_t offset), (at, size, protection, flags, fd, offset),
     MMAP, fd, ENOMEM, MAP_FAILED)
