/* Ends a worker process together with the controller's, however that ends.
 *
 * A thread in C, which waits without the GIL: a worker that never gives it back must end, too. With
 * the worker goes its process group, which is all that its functions have started. */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

static void
end_group(void)
{
    /* The leader of a group takes it along; another process has no business with its group. */
    if (getpgrp() == getpid())
        kill(0, SIGKILL);
    kill(getpid(), SIGKILL);
}

static void *
wait_for_end(void *argument)
{
    struct pollfd process = {.fd = (int)(intptr_t)argument, .events = POLLIN};
    while (poll(&process, 1, -1) < 0 && errno == EINTR)
        ;
    end_group();
    return NULL;
}

static PyObject *
end_with_parent(PyObject *module, PyObject *args)
{
    int parent;
    if (!PyArg_ParseTuple(args, "i:end_with_parent", &parent))
        return NULL;
    int fd = (int)syscall(SYS_pidfd_open, parent, 0);
    if (fd < 0) {
        /* An old kernel: the signal comes when the *thread* ends that has started this process. */
        if (errno != ESRCH && prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    /* It may have ended before, and its number have been given to another one. */
    if (getppid() != parent)
        end_group();
    if (fd < 0)
        Py_RETURN_NONE;
    /* Signals are for the other threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 65536);
    int error = pthread_create(&thread, &attributes, wait_for_end, (void *)(intptr_t)fd);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        close(fd);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"end_with_parent", end_with_parent, METH_VARARGS,
     "End this process and its group as soon as the parent has ended."},
    {NULL},
};

int
add_orphan(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
