/* What reads bytes that another process has written, under libFuzzer; scripts/fuzz builds and runs
 * it. The first byte of an input says what reads the rest. Python is there, but none of the
 * package's: whatever the bytes say, no code of theirs is run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codec.h"
#include "controller.h"
#include "peer_mail.h"
#include "ring.h"
#include "worker.h"

enum { WORKERS = 2, RING_SIZE = 1024, BOX_SIZE = 128 };

static PyObject *program;

static void
check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "fuzz: %s\n", what);
    if (PyErr_Occurred())
        PyErr_Print();
    abort();
}

/* What comes of bytes that mean nothing. */
static void
forgive(void)
{
    check(PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_TypeError)
              || PyErr_ExceptionMatches(PyExc_RecursionError)
              || PyErr_ExceptionMatches(PyExc_LookupError) || PyErr_ExceptionMatches(PyExc_OSError)
              || PyErr_ExceptionMatches(PyExc_MemoryError),
          "an exception of another kind");
    PyErr_Clear();
}

/* Bytes of an input, from the front. */
typedef struct {
    const uint8_t *data;
    size_t size;
} Input;

static uint64_t
number(Input *input, size_t bytes)
{
    uint64_t value = 0;
    if (bytes > input->size)
        bytes = input->size;
    memcpy(&value, input->data, bytes);
    input->data += bytes;
    input->size -= bytes;
    return value;
}

/* Write some of the input over `size` bytes of memory that is shared. */
static void
damage(Input *input, uint8_t *memory, size_t size)
{
    size_t at = number(input, 2) % size, bytes = number(input, 1) % 16;
    if (bytes > size - at)
        bytes = size - at;
    if (bytes > input->size)
        bytes = input->size;
    memcpy(memory + at, input->data, bytes);
    input->data += bytes;
    input->size -= bytes;
}

/* Values -------------------------------------------------------------------------------------- */

static PyObject *
look_up(void *context, uint64_t id)
{
    *(bool *)context = true;
    return PyLong_FromUnsignedLongLong(id);
}

/* What is decoded is encoded as the same bytes again, unless registers are in it. */
static void
read_values(Input input)
{
    Reader reader = {input.data, input.size, 0};
    while (reader.at < reader.size) {
        size_t start = reader.at;
        bool looked_up = false;
        PyObject *value = decode_compact(&reader, look_up, &looked_up);
        check(reader.at <= reader.size, "read beyond the end");
        if (value == NULL) {
            if (PyErr_Occurred())
                forgive();
            return;
        }
        Buffer buffer;
        buffer_init(&buffer);
        int done = encode_compact(&buffer, value);
        check(done >= 0 && !PyErr_Occurred(), "what was decoded cannot be encoded");
        check(done == 0 || looked_up
                  || (buffer.size == reader.at - start
                      && memcmp(buffer.data, reader.data + start, buffer.size) == 0),
              "decoded and encoded again it is something else");
        buffer_free(&buffer);
        Py_DECREF(value);
    }
}

/* Commands ------------------------------------------------------------------------------------ */

static const char program_text[] =
    "import collections, struct\n"
    "class Failed: pass\n"
    "set_failed_type(Failed)\n"
    "class Worker(WorkerState):\n"
    "    def _decode_arguments(self, view):\n"
    "        return (bytes(view),), {}\n"
    "    def _fail_call(self, number, register, error):\n"
    "        self.registers[register] = Failed()\n"
    "    def lookup(self, register):\n"
    "        raise LookupError(register)\n"
    "def function(*values):\n"
    "    return values[:1]\n"
    "def fail(*values):\n"
    "    raise ValueError(len(values))\n"
    "def name(kind, text):\n"
    "    return struct.pack('<BI', kind, len(text)) + text\n"
    "def new_worker():\n"
    "    worker = Worker()\n"
    "    worker.registers = {1: function, 2: 5, 3: Failed(), 4: b'x' * 2000, 5: (1,)}\n"
    "    worker.functions = {name(1, b'f') + b'\\5': function, name(2, b'm:f'): fail,\n"
    "                        name(2, b'm:g'): ('sys', 1, {}, 'g', fail)}\n"
    "    worker._codes = collections.OrderedDict({bytes(16): [b'', function, 0]})\n"
    "    worker._failures = []\n"
    "    worker._worker_id = 1\n"
    "    return worker\n"
    "def step(message):\n"
    "    new_worker().step(message)\n"
    "def drain(node, message):\n"
    "    there, replies = Ring(node), Replies(node)\n"
    "    mine = Node(node.segment, 1)\n"
    "    mine.spin = 0\n"
    "    ring, box = Ring(mine), Replies(mine)\n"
    "    worker = new_worker()\n"
    "    worker.set_node(mine)\n"
    "    assert there.try_push(1, message)\n"
    "    if worker.drain(ring, box, False) is False:\n"
    "        assert ring.pop() == message\n"
    "    assert ring.pop() is None\n"
    "    come = collections.deque()\n"
    "    while box.pump():\n"
    "        replies.poll(come)\n"
    "    replies.poll(come)\n"
    "    assert len(come) < 2\n"
    "def open_ends(node):\n"
    "    other = Node(node.segment, 1)\n"
    "    return Ring(node), Replies(node), Ring(other), Replies(other), collections.deque()\n";

static PyObject *
of_program(const char *name)
{
    PyObject *value = PyDict_GetItemString(program, name);
    check(value != NULL, name);
    return value;
}

static void
done(PyObject *result)
{
    if (result == NULL)
        forgive();
    Py_XDECREF(result);
}

static void
run_command(Input input)
{
    done(PyObject_CallFunction(of_program("step"), "y#", input.data, (Py_ssize_t)input.size));
}

/* The ring and the boxes ---------------------------------------------------------------------- */

/* A node block in memory of its very size, so that what is read or written beside it shows. */
static SegmentObject *
new_segment(size_t size)
{
    SegmentObject *segment = (SegmentObject *)Segment_Type->tp_alloc(Segment_Type, 0);
    check(segment != NULL, "no memory");
    segment->base = aligned_alloc(CACHE_LINE, size);
    check(segment->base != NULL, "no memory");
    memset(segment->base, 0, size);
    segment->size = (Py_ssize_t)size;
    segment->fd = -1;
    return segment;
}

static void
free_segment(SegmentObject *segment)
{
    check(Py_REFCNT(segment) == 1, "somebody still holds the segment");
    free(segment->base);
    segment->base = NULL; /* it has not been mapped */
    Py_DECREF(segment);
}

static PyObject *
new_node(SegmentObject *segment)
{
    PyObject *node = PyObject_CallFunction((PyObject *)Node_Type, "OIIII", segment, 0, WORKERS,
                                           RING_SIZE, BOX_SIZE);
    check(node != NULL, "no node");
    ((NodeObject *)node)->node.spin_ns = 0;
    return node;
}

static void
drain_ring(Input input)
{
    if (input.size > RING_SIZE / 4)
        return;
    SegmentObject *segment = new_segment(node_size(WORKERS, RING_SIZE, BOX_SIZE));
    PyObject *node = new_node(segment);
    done(PyObject_CallFunction(of_program("drain"), "Oy#", node, input.data,
                               (Py_ssize_t)input.size));
    Py_DECREF(node);
    free_segment(segment);
}

/* Whether a reader may look at what comes next: a side block would be opened, and whose that is is
 * not for the input to say. */
static void
keep_at_home(Ring *ring)
{
    RecordHead record;
    const uint8_t *data;
    if (ring_read(ring, &record, &data) != 1)
        return;
    check(data >= ring->data && data + record.size <= ring->data + ring->size,
          "a record that is not in the ring");
    uint8_t *payload = (uint8_t *)data;
    SideRecord side;
    if (record.kind != RECORD_SIDE)
        return;
    memcpy(&side, data, sizeof side);
    if (side.pid != getpid()) {
        side.pid = INT32_MAX;
        memcpy(payload, &side, sizeof side);
    }
}

static void
use_damaged_node(Input input)
{
    static const uint8_t bytes[RING_SIZE];
    size_t size = node_size(WORKERS, RING_SIZE, BOX_SIZE);
    SegmentObject *segment = new_segment(size);
    PyObject *node = new_node(segment);
    PyObject *ends = PyObject_CallOneArg(of_program("open_ends"), node), *come;
    RingObject *there, *ring;
    RepliesObject *replies, *box;
    const Node *own = &((NodeObject *)node)->node;
    check(ends != NULL
              && PyArg_ParseTuple(ends, "OOOOO", &there, &replies, &ring, &box, &come),
          "no ends");
    while (input.size > 0) {
        switch (number(&input, 1) % 8) {
        case 0: /* the ring is all that lies between */
            damage(&input, segment->base + own->ring_offset,
                   own->boxes_offset - own->ring_offset);
            break;
        case 1:
            damage(&input, segment->base + own->boxes_offset, size - own->boxes_offset);
            break;
        case 2: {
            uint64_t count = number(&input, 1) * 2;
            if (ring_published(&there->ring) > 20)
                break;
            done(PyObject_CallMethod((PyObject *)there, "try_push", "Ky#",
                                     ring_published(&there->ring) + 1, bytes, (Py_ssize_t)count));
            break;
        }
        case 3:
            keep_at_home(&ring->ring);
            done(PyObject_CallMethod((PyObject *)ring, "pop", NULL));
            break;
        case 4:
            done(PyObject_CallMethod((PyObject *)box, "send", "y#", bytes,
                                     (Py_ssize_t)number(&input, 1)));
            break;
        case 5:
            done(PyObject_CallMethod((PyObject *)box, "pump", NULL));
            done(PyObject_CallMethod((PyObject *)replies, "poll", "O", come));
            break;
        case 6:
            damage(&input, segment->base, size);
            break;
        default: {
            Node other = {0};
            char text[NODE_FUNCTION_SIZE];
            if (node_attach(&other, segment->base, size, (uint32_t)number(&input, 1) % WORKERS))
                check(node_function(other.mine, text) <= sizeof text, "a text that is too long");
            done(PyObject_CallMethod(node, "status", "I", 1));
        }
        }
    }
    Py_DECREF(ends);
    Py_DECREF(node);
    free_segment(segment);
}

/* Mail ---------------------------------------------------------------------------------------- */

/* So many workers that a ring is small. */
enum { CORRESPONDENTS = 90, LARGEST_LETTER = 65536 };
/* Messages of these sizes lie in the ring, wait for room, or are lent. */
static const size_t letter_sizes[] = {0, 5, 700, 5000, 8192, 8193, 60000};

static void
receive(struct mail *mail)
{
    const struct mail_header *header = mail_look(mail, 0);
    if (header == NULL)
        return;
    if (header->bytes > LARGEST_LETTER) {
        mail_drop(mail, 0);
        return;
    }
    /* The size is the receiver's own copy; the array is made for that. */
    size_t bytes = header->bytes;
    uint8_t *to = malloc(bytes);
    check(to != NULL || bytes == 0, "no memory");
    /* It wraps around at most once. */
    for (int i = 0; i < 2 && mail_read(mail, 0, to, NULL, getpid()) == 0; i++)
        ;
    free(to);
}

static void
use_damaged_mail(Input input)
{
    static const uint8_t bytes[LARGEST_LETTER], signature[CELLS_SIGNATURE];
    /* The block is of so many pairs, but one is all that is used of it. */
    size_t size = mail_bytes(CORRESPONDENTS) / CORRESPONDENTS / CORRESPONDENTS;
    struct mail_pair *pair = aligned_alloc(CELLS_APART, size);
    check(pair != NULL, "no memory");
    memset(pair, 0, size);
    struct mail mails[2] = {0};
    for (int w = 0; w < 2; w++)
        check(mail_make(&mails[w], (uint8_t *)pair, w, CORRESPONDENTS) == 0, "no memory");
    mails[0].out[1].pair = mails[1].in[0].pair = pair;
    while (input.size > 0) {
        switch (number(&input, 1) % 6) {
        case 0:
        case 1:
            damage(&input, (uint8_t *)pair, size);
            break;
        case 2: {
            size_t which = number(&input, 1) % (sizeof letter_sizes / sizeof *letter_sizes);
            mail_send(&mails[0], 1, 1, signature, bytes, letter_sizes[which],
                      number(&input, 1) % 2);
            break;
        }
        case 3:
            receive(&mails[1]);
            break;
        case 4:
            mail_drop(&mails[1], 0);
            break;
        default:
            mail_pump(&mails[0], NULL);
        }
    }
    for (int w = 0; w < 2; w++)
        mail_free(&mails[w]);
    free(pair);
}

/* libFuzzer ----------------------------------------------------------------------------------- */

PyMODINIT_FUNC PyInit__native(void);

int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    /* In Python's own blocks nothing could be found. */
    before.allocator = PYMEM_ALLOCATOR_MALLOC;
    PyStatus status = Py_PreInitialize(&before);
    PyImport_AppendInittab("_native", PyInit__native);
    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.site_import = 0;
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.home, PYTHON_HOME);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
    PyConfig_Clear(&config);
    PyObject *module = PyImport_ImportModule("_native");
    check(module != NULL, "no module");
    program = PyModule_GetDict(module);
    PyDict_SetItemString(program, "__builtins__", PyEval_GetBuiltins());
    PyObject *ran = PyRun_String(program_text, Py_file_input, program, program);
    check(ran != NULL, "the program does not run");
    Py_DECREF(ran);
    return 0;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const readers[])(Input) = {
        read_values, run_command, drain_ring, use_damaged_node, use_damaged_mail,
    };
    if (size == 0)
        return -1;
    readers[data[0] % (sizeof readers / sizeof *readers)]((Input){data + 1, size - 1});
    check(!PyErr_Occurred(), "an exception that nobody has seen");
    return 0;
}
