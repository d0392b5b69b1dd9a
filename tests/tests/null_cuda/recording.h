// What a run over null_cuda.c submits, as text: a line for each kernel, GEMM, attention call, copy and fill, in the file that
// NULL_CUDA_LAUNCHES names. A line begins with its stream; launches.rs sorts by that, since two threads submit.
//
// An address is written as @allocation/bytes+offset: allocations are numbered from the start of the process, and none gets the addresses
// of another one. Arguments lie one after the other in words of 16 bytes, zero where there is no value (debug builds of firebrick-cuda see
// to that), so a kernel's are read without its declaration.
//
// Trade-off: of the last argument of a kernel 16 bytes are read, which is all of it unless it is a table. Kernels of CubeCL's go by name and
// grid alone. Calls of a graph are written when it is recorded, not when it is launched.

#include <pthread.h>
#include <stdarg.h>

static int launches_file = -1;

// --------------------------------------------------------------------------------------------------------- allocations

enum { PAGE = 4096 };

// In the order of their addresses.
struct allocation { uint64_t start; size_t bytes; int is_live; };
static struct allocation *allocations;
static size_t allocation_count;
static pthread_mutex_t allocating = PTHREAD_MUTEX_INITIALIZER;
// Where the next allocation begins. As two 32-bit numbers an address is no pair of sizes that anything has.
static uint64_t next_start = 0x6b6b00000000;

static struct allocation *find(uint64_t address) {
    size_t low = 0, high = allocation_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (allocations[middle].start <= address) low = middle + 1; else high = middle;
    }
    struct allocation *found = low ? &allocations[low - 1] : 0;
    // The end counts: an empty part of a buffer may begin there.
    return found && found->is_live && address <= found->start + found->bytes ? found : 0;
}

// Returns the bytes that were taken, or 0. Pages that nothing touches take no memory.
static size_t allocate_pages(uint64_t *address, size_t bytes) {
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_lock(&allocating);
    void *start = mmap((void *)next_start, whole, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    const int is_there = start == (void *)next_start;
    if (is_there) {
        if (allocation_count % 1024 == 0) allocations = realloc(allocations, (allocation_count + 1024) * sizeof *allocations);
        allocations[allocation_count++] = (struct allocation){next_start, bytes, 1};
        *address = next_start;
        next_start += whole + PAGE;
    }
    pthread_mutex_unlock(&allocating);
    return is_there ? whole : 0;
}

// Returns the bytes that were returned, or 0.
static size_t release_pages(uint64_t address) {
    pthread_mutex_lock(&allocating);
    struct allocation *found = find(address);
    const size_t whole = found && found->start == address ? (found->bytes + PAGE - 1) / PAGE * PAGE : 0;
    if (whole) found->is_live = 0, munmap((void *)address, whole);
    pthread_mutex_unlock(&allocating);
    return whole;
}

// --------------------------------------------------------------------------------------------------------------- lines

static __thread char line[1 << 16];
static __thread size_t length;

static void put(const char *form, ...) {
    va_list values;
    va_start(values, form);
    length += vsnprintf(line + length, sizeof line - length, form, values);
    va_end(values);
    if (length >= sizeof line) abort();
}

// A number, or an address of memory that is there.
static void put_word(uint64_t word) {
    pthread_mutex_lock(&allocating);
    const struct allocation *found = find(word);
    if (found) put(" @%zu/%zu+%zu", found - allocations, found->bytes, word - found->start);
    else put(word >> 24 ? " 0x%zx" : " %zu", (size_t)word);
    pthread_mutex_unlock(&allocating);
}

struct stream { int number; };

// Begins a line; 0 where nothing is recorded.
static int begin(const struct stream *stream, const char *what) {
    if (launches_file < 0) return 0;
    length = 0;
    put("%d %s", stream ? stream->number : -1, what);
    return 1;
}

static void end(void) {
    put("\n");
    if (write(launches_file, line, length) != (ssize_t)length) abort();
}

static void record_copy(const struct stream *stream, const char *what, uint64_t to, uint64_t from, size_t bytes) {
    if (!begin(stream, what)) return;
    if (to) put_word(to);
    if (from) put_word(from);
    put(" %zu bytes", bytes);
    end();
}

// What Kernel::launch of firebrick-cuda gives: the addresses of the arguments, in ascending order, and null after the last.
static void put_arguments(void **arguments) {
    for (int index = 0; arguments[index]; ++index) {
        const uint64_t *words = arguments[index];
        size_t count = arguments[index + 1] ? ((char *)arguments[index + 1] - (char *)words) / sizeof *words : 2;
        while (count > 1 && words[count - 1] == 0) --count;
        if (count > 1) put(" [");
        for (size_t word = 0; word < count; ++word) put_word(words[word]);
        if (count > 1) put(" ]");
    }
}

// The first letter of a function says whose it is: e of the engine, b of Burn.
static void record_kernel(const char *function, const unsigned grid[3], const unsigned block[3], unsigned shared, const struct stream *stream, void **arguments) {
    if (!begin(stream, *function == 'e' ? "kernel" : "burn")) return;
    put(" %s grid %u %u %u block %u %u %u shared %u", function + 1, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared);
    if (*function == 'e') put_arguments(arguments);
    end();
}

// ---------------------------------------------------------------------------------------------------------------- GEMMs

struct layout { unsigned type; uint64_t rows, columns; int64_t leading; };

// Attributes in the order in which they were set first.
struct description { unsigned compute, count; struct { unsigned attribute; uint64_t value; } of[16]; };

static void describe(struct description *description, unsigned attribute, const void *value, size_t bytes) {
    unsigned index = 0;
    while (index < description->count && description->of[index].attribute != attribute) ++index;
    if (index == 16 || bytes > 8) abort();
    if (index == description->count) ++description->count;
    description->of[index].attribute = attribute, description->of[index].value = 0;
    memcpy(&description->of[index].value, value, bytes);
}

static void put_matrix(const char *name, const struct layout *layout, const void *address) {
    put(" %s %u [%zu %zu]/%zu", name, layout->type, (size_t)layout->rows, (size_t)layout->columns, (size_t)layout->leading);
    put_word((uint64_t)address);
}

// ---------------------------------------------------------------------------------------------------------------- cuDNN

// A descriptor is the hash of what it was made of, without handles and addresses; a variant pack has addresses too.
struct descriptor { uint64_t hash; int count; const void *pointers[64]; };

static void mix(uint64_t *hash, const void *bytes, size_t count) {
    for (size_t index = 0; index < count; ++index) *hash = (*hash ^ ((const unsigned char *)bytes)[index]) * 1099511628211u;
}

static void set_attribute(struct descriptor *descriptor, int name, int type, int64_t count, const void *values) {
    enum { HANDLE = 0, BOOLEAN = 2, INT64 = 3, POINTER = 6, DESCRIPTOR = 15 };
    const int key[] = {name, type, (int)count};
    mix(&descriptor->hash, key, sizeof key);
    if (type == DESCRIPTOR)
        for (int64_t index = 0; index < count; ++index)
            mix(&descriptor->hash, &((struct descriptor *const *)values)[index]->hash, sizeof descriptor->hash);
    else if (type == POINTER)
        for (int64_t index = 0; index < count; ++index) {
            if (descriptor->count == 64) abort();
            descriptor->pointers[descriptor->count++] = ((const void *const *)values)[index];
        }
    else if (type != HANDLE)
        mix(&descriptor->hash, values, count * (type == BOOLEAN ? 1 : type == INT64 ? 8 : 4));
}

// A pointer that is no address on the device is that of a scalar.
static void record_attention(const struct stream *stream, const struct descriptor *plan, const struct descriptor *pack) {
    if (!begin(stream, "attention")) return;
    put(" plan %zx pack %zx", (size_t)plan->hash, (size_t)pack->hash);
    for (int index = 0; index < pack->count; ++index) {
        const uint64_t address = (uint64_t)pack->pointers[index];
        pthread_mutex_lock(&allocating);
        const int is_scalar = address && !find(address);
        pthread_mutex_unlock(&allocating);
        if (is_scalar) put(" %g", *(const float *)address); else put_word(address);
    }
    end();
}
