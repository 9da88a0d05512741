/* Memory that other processes can find: a memfd, which they open through /proc/PID/fd.
 *
 * It has no name, so nothing is left of it when its last process ends, however that ends, and no
 * limit of /dev/shm. A nonce in its first bytes proves to a peer that it runs on the same node and
 * has the right memory: process ids alone prove neither.
 *
 * Where a system has no memfd, or does not let processes look into each other's descriptors (other
 * user namespaces, a /proc that hides them), it is a POSIX shared memory object, whose name follows
 * from the nonce. The one who has made it takes the name away as soon as all have found it, and at
 * the exit at the latest; only where it is killed in between does the name stay in /dev/shm. */
#include "shared.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* The names that are there, with the process that gave them: a forked child inherits the list. */
struct name {
    struct name *next;
    pid_t owner;
    uint8_t nonce[NONCE_SIZE];
};

static struct name *names;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t exit_hook = PTHREAD_ONCE_INIT;

enum { NAME_SIZE = 16 + 2 * NONCE_SIZE };

static void
name_of(const uint8_t *nonce, char *text)
{
    int at = snprintf(text, NAME_SIZE, "/spmd_disco-");
    for (int i = 0; i < NONCE_SIZE; i++)
        at += snprintf(text + at, NAME_SIZE - at, "%02x", nonce[i]);
}

static void
unlink_all(void)
{
    /* Nobody waits here: a child may have inherited the lock from a thread that it has not. */
    if (pthread_mutex_trylock(&names_lock) != 0)
        return;
    for (struct name *n = names; n != NULL; n = n->next) {
        char text[NAME_SIZE];
        name_of(n->nonce, text);
        if (n->owner == getpid())
            shm_unlink(text);
    }
    pthread_mutex_unlock(&names_lock);
}

static void
install_exit_hook(void)
{
    atexit(unlink_all);
}

static int
make_named(const uint8_t *nonce)
{
    struct name *entry = malloc(sizeof *entry);
    if (entry == NULL) {
        errno = ENOMEM;
        return -1;
    }
    pthread_once(&exit_hook, install_exit_hook);
    char text[NAME_SIZE];
    name_of(nonce, text);
    entry->owner = getpid();
    memcpy(entry->nonce, nonce, NONCE_SIZE);
    pthread_mutex_lock(&names_lock);
    int fd = shm_open(text, O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR);
    if (fd >= 0) {
        entry->next = names;
        names = entry;
    }
    pthread_mutex_unlock(&names_lock);
    if (fd < 0)
        free(entry);
    return fd;
}

int
shared_make(size_t size, uint8_t *nonce, bool *named)
{
    if (getrandom(nonce, NONCE_SIZE, 0) != NONCE_SIZE)
        return -1;
    int fd = -1;
    if (!*named) {
        fd = memfd_create("spmd_disco", MFD_CLOEXEC);
        /* What filters of system calls answer, besides what a kernel without it does. */
        if (fd < 0 && errno != ENOSYS && errno != EPERM && errno != EACCES)
            return -1;
    }
    if (fd < 0) {
        *named = true;
        fd = make_named(nonce);
    }
    if (fd >= 0 && ftruncate(fd, (off_t)size) < 0) {
        int error = errno;
        close(fd);
        shared_unlink(nonce);
        errno = error;
        return -1;
    }
    return fd;
}

/* Whether a file begins with the nonce, and how large it is. */
static bool
is_right(int fd, const uint8_t *nonce, size_t *size)
{
    struct stat info;
    uint8_t found[NONCE_SIZE];
    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)
        || pread(fd, found, sizeof found, 0) != sizeof found
        || memcmp(found, nonce, sizeof found) != 0)
        return false;
    *size = (size_t)info.st_size;
    return true;
}

int
shared_find(pid_t pid, int fd, const uint8_t *nonce, size_t *size)
{
    char path[64], name[NAME_SIZE];
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)pid, fd);
    name_of(nonce, name);
    int error = 0;
    for (int named = 0; named < 2; named++) {
        /* Whatever it is, opening it does not wait. */
        int found = named ? shm_open(name, O_RDWR, 0) : open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (found >= 0 && is_right(found, nonce, size))
            return found;
        if (!named)
            error = found < 0 ? errno : ESTALE;
        if (found >= 0)
            close(found);
    }
    errno = error;
    return -1;
}

void
shared_unlink(const uint8_t *nonce)
{
    pthread_mutex_lock(&names_lock);
    for (struct name **at = &names; *at != NULL; at = &(*at)->next) {
        struct name *entry = *at;
        if (memcmp(entry->nonce, nonce, NONCE_SIZE) != 0)
            continue;
        char text[NAME_SIZE];
        name_of(nonce, text);
        if (entry->owner == getpid())
            shm_unlink(text);
        *at = entry->next;
        free(entry);
        break;
    }
    pthread_mutex_unlock(&names_lock);
}
