/* The controller and workers of a node as threads of one process, to be run under a sanitizer:
 * records of all sizes through a small ring, and replies through small boxes. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ring.h"

#define WORKERS 4
#define RECORDS 20000
#define RING_SIZE 2048
#define BOX_SIZE 128

static uint8_t *memory;
static uint64_t memory_size;

static void
check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static uint32_t
size_of(uint64_t number)
{
    return (uint32_t)(number * 7919 % (RING_SIZE / 4));
}

/* Waits until `ready` says so, at the doorbell. */
static void
await(Node *node, bool (*ready)(void *), void *what)
{
    node_begin_wait(node);
    while (true) {
        uint32_t seen = node_bell(node);
        if (ready(what))
            break;
        node_wait(node, seen, node_now() + 1000000000);
    }
    node_end_wait(node);
}

/* The workers ----------------------------------------------------------------------------------- */

static bool
has_record(void *what)
{
    return ring_spin(what, 0);
}

static bool
has_space(void *what)
{
    return !box_block(what);
}

static void *
work(void *argument)
{
    uint32_t me = (uint32_t)(uintptr_t)argument;
    Node node = {.spin_ns = me * 10000};
    check(node_attach(&node, memory, memory_size, me), "no node block");
    Ring ring;
    ring_open(&ring, &node);
    Box box;
    box_open(&box, &node, me);
    for (uint64_t number = 1; number <= RECORDS; number++) {
        RecordHead record;
        const uint8_t *data;
        int result;
        while ((result = ring_read(&ring, &record, &data)) == 0)
            await(&node, has_record, &ring);
        check(result == 1, "the ring is damaged");
        check(record.number == number && record.size == size_of(number), "another record");
        for (uint32_t i = 0; i < record.size; i++)
            check(data[i] == (uint8_t)number, "other bytes");
        ring_pass(&ring);
        node_begin_command(&node, number, "function", number % 9);
        node_leave_command(&node, number);
        for (size_t sent = 0; sent < sizeof number;) {
            int64_t written = box_write(&box, (uint8_t *)&number + sent, sizeof number - sent);
            check(written >= 0, "the box is damaged");
            sent += (size_t)written;
            node_ring_bell(&node, 0);
            if (sent < sizeof number)
                await(&node, has_space, &box);
        }
    }
    return NULL;
}

/* The controller -------------------------------------------------------------------------------- */

typedef struct {
    Ring ring;
    Box boxes[WORKERS];
    uint64_t heard[WORKERS];
    uint32_t size;
    Node *node;
} Controller;

static void
hear(Controller *controller)
{
    for (uint32_t i = 1; i < WORKERS; i++) {
        Box *box = &controller->boxes[i];
        int64_t available = box_available(box);
        check(available >= 0, "a box is damaged");
        if (available == 0)
            continue;
        while (available >= (int64_t)sizeof(uint64_t)) {
            uint64_t number;
            box_read(box, &number, sizeof number);
            check(number == ++controller->heard[i], "another reply");
            available -= sizeof number;
        }
        box_release(box, controller->node, i);
    }
}

static bool
has_room(void *what)
{
    Controller *controller = what;
    hear(controller);
    if (ring_fits(&controller->ring, controller->size))
        return true;
    ring_want_room(&controller->ring, controller->size, 0);
    ring_look_at_tails(&controller->ring);
    return ring_fits(&controller->ring, controller->size);
}

static bool
heard_all(void *what)
{
    Controller *controller = what;
    hear(controller);
    for (int i = 1; i < WORKERS; i++)
        if (controller->heard[i] < RECORDS)
            return false;
    return true;
}

int
main(void)
{
    memory_size = node_size(WORKERS, RING_SIZE, BOX_SIZE);
    memory = mmap(NULL, memory_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "no memory");
    Node node = {.spin_ns = 20000};
    check(node_initialise(&node, memory, memory_size, WORKERS, RING_SIZE, BOX_SIZE), "no room");
    static Controller controller;
    controller.node = &node;
    ring_open(&controller.ring, &node);
    pthread_t threads[WORKERS];
    for (uint32_t i = 1; i < WORKERS; i++) {
        box_open(&controller.boxes[i], &node, i);
        check(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "no thread");
    }
    static uint8_t bytes[RING_SIZE];
    char text[NODE_FUNCTION_SIZE];
    for (uint64_t number = 1; number <= RECORDS; number++) {
        controller.size = size_of(number);
        await(&node, has_room, &controller);
        memset(bytes, (uint8_t)number, controller.size);
        struct iovec parts[] = {{bytes, controller.size / 3},
                                {bytes, controller.size - controller.size / 3}};
        ring_write(&controller.ring, RECORD_PLAIN, number, parts, 2);
        if (number % 64 == 0) {
            check(node_function(&node.status[1], text) <= sizeof text, "a text that is too long");
            node_interrupt(&node, number);
        }
    }
    await(&node, heard_all, &controller);
    for (uint32_t i = 1; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
        check(atomic_load(&node.status[i].executed) == RECORDS, "not all are executed");
    }
    check(node_interrupted_through(&node) == RECORDS / 64 * 64, "another interrupt");
    munmap(memory, memory_size);
    return 0;
}
