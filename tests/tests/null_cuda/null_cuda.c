// A CUDA driver, cuBLASLt, cuDNN and NVRTC that compute nothing: every call succeeds at once, kernels and GEMMs leave memory as it is. With
// it the host's side of the CUDA backend runs on a machine without a card: main.rs says what for. Memory of the "device" is memory of the
// host, reserved and not touched, so copies to it and from it work.
//
// What was called is counted in a file of 64-bit integers that NULL_CUDA_COUNTS names, in the order of `enum count`, and written down where
// NULL_CUDA_LAUNCHES names a file (recording.h). Two kernels have a result, which decides what is launched next: the rows of each expert.
//
// Trade-off: written for the calls that the tests make; another one is a missing symbol, which the caller reports.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "recording.h"

#define API __attribute__((visibility("default")))
// Calls whose arguments do not matter here.
#define SUCCEEDS(name) API int name(void) { return 0; }
#define DESTROYS(name) API int name(void *object) { free(object); return 0; }

// The first four also count what a graph does when it is launched; SUBMITTED counts the calls that submit work, of which a graph is one.
enum count { LAUNCHES, LAUNCHED, GEMMS, ATTENTIONS, BYTES, ALLOCATIONS, SUBMITTED, COUNTS };
enum { OF_GRAPHS = BYTES };

static int64_t *counts;

__attribute__((constructor)) static void map_counts(void) {
    static int64_t own[COUNTS];
    const char *path = getenv("NULL_CUDA_COUNTS");
    const int file = path ? open(path, O_RDWR) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (path && mapped == MAP_FAILED) fprintf(stderr, "cannot count in %s\n", path), abort();
    counts = mapped == MAP_FAILED ? own : mapped;
    const char *launches = getenv("NULL_CUDA_LAUNCHES");
    if (launches && (launches_file = open(launches, O_WRONLY | O_APPEND)) < 0) abort();
}

static int add(enum count which, int64_t number) {
    __atomic_add_fetch(&counts[which], number, __ATOMIC_RELAXED);
    return 0;
}

// A graph is what its work adds to the first counts.
static __thread int64_t *recorded;

// Counts a call that submits work: now, or when the graph that is being recorded is launched.
static int submit(enum count which, int64_t launched) {
    if (recorded) return recorded[which] += 1, recorded[LAUNCHED] += launched, 0;
    add(LAUNCHED, launched), add(SUBMITTED, 1);
    return add(which, 1);
}

// ------------------------------------------------------------------------------------------------------------- driver

static int allocate(uint64_t *address, size_t bytes) {
    const size_t whole = allocate_pages(address, bytes);
    if (!whole) return 2; // CUDA_ERROR_OUT_OF_MEMORY
    add(ALLOCATIONS, 1);
    return add(BYTES, whole);
}

static int release(uint64_t address) {
    if (!address) return 0;
    const size_t whole = release_pages(address);
    add(BYTES, -(int64_t)whole);
    return whole == 0;
}

static const size_t TOTAL_BYTES = 80ull << 30;

API int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cuDeviceGetCount(int *count) { *count = 1; return 0; }
API int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
API int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "null CUDA device", bytes); return 0; }
API int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = TOTAL_BYTES; return 0; }
API int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = TOTAL_BYTES, *available = TOTAL_BYTES - counts[BYTES];
    return 0;
}
SUCCEEDS(cuTensorMapEncodeTiled)
API int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); return 0; }

// CUDA_MEMCPY2D; kind 1 is the host, 2 the device.
struct copy_2d {
    size_t from_x, from_y;
    int from_kind;
    const char *from_host;
    uint64_t from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_kind;
    char *to_host;
    uint64_t to_device;
    void *to_array;
    size_t to_pitch, width, height;
};

// The attributes of an H100 that anything asks for; others are 1. NULL_CUDA_CAPABILITY makes it a card of another generation.
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int OF_H100[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32}, {12, 65536},
        {16, 132}, {33, 0}, {34, 0}, {38, 52428800}, {39, 2048}, {50, 0}, {75, 9}, {76, 0}, {81, 233472}, {97, 232448},
        {106, 32},
    };
    *value = 1;
    for (size_t k = 0; k < sizeof OF_H100 / sizeof *OF_H100; ++k)
        if (OF_H100[k][0] == attribute) *value = OF_H100[k][1];
    const char *capability = getenv("NULL_CUDA_CAPABILITY");
    int major, minor;
    if (capability != NULL && sscanf(capability, "%d.%d", &major, &minor) == 2) {
        if (attribute == 75) *value = major;
        if (attribute == 76) *value = minor;
        // Shared memory of a block: those with 100 KiB of a multiprocessor.
        if (attribute == 97 && (major == 8 || major == 12)) *value = 101376;
    }
    return 0;
}

API int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x1000; return 0; }
API int cuCtxGetCurrent(void **context) { *context = (void *)0x1000; return 0; }
API int cuCtxPopCurrent_v2(void **context) { *context = (void *)0x1000; return 0; }
API int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)0x2000; return 0; }
API int cuStreamCreate(void **stream, unsigned flags) {
    static int streams;
    struct stream *new = malloc(sizeof *new);
    new->number = __atomic_add_fetch(&streams, 1, __ATOMIC_RELAXED);
    *stream = new;
    return 0;
}
API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
API int cuEventCreate(void **event, unsigned flags) { *event = malloc(16); return 0; }
API int cuEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1.0f; return 0; }
API int cuMemAlloc_v2(uint64_t *address, size_t bytes) { return allocate(address, bytes); }
API int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) { return allocate(address, bytes); }
API int cuMemFree_v2(uint64_t address) { return release(address); }
API int cuMemFreeAsync(uint64_t address, void *stream) { return release(address); }
API int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    add(ALLOCATIONS, 1);
    return posix_memalign(memory, PAGE, bytes ? bytes : 1) ? 2 : 0;
}
API int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { add(ALLOCATIONS, 1); return 0; }
API int cuMemAllocHost_v2(void **memory, size_t bytes) { return cuMemHostAlloc(memory, bytes, 0); }
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    record_copy(stream, "to device", to, 0, bytes);
    memcpy((void *)to, from, bytes);
    return 0;
}
API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    record_copy(stream, "to host", 0, from, bytes);
    memcpy(to, (void *)from, bytes);
    return 0;
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    record_copy(stream, "copy", to, from, bytes);
    memmove((void *)to, (void *)from, bytes);
    return 0;
}
// The engine compiles to machine code, Burn to PTX; see the images below.
API int cuModuleLoadData(void **module, const void *image) { *module = strdup(image); return 0; }
// A function is the first letter of its module, and its name; it is never freed, as a driver frees it with its module.
API int cuModuleGetFunction(void **function, const char *module, const char *name) {
    return asprintf((char **)function, "%c%s", *module, name) < 0;
}
API int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
API int cuGetErrorName(int error, const char **text) { *text = "ERROR_OF_NULL_CUDA"; return 0; }
API int cuGetErrorString(int error, const char **text) { *text = "an error of the CUDA driver that computes nothing"; return 0; }

// Of all rows, none go to the first expert, and to each one as many more as it is later.
static void count_rows(int32_t *rows, int64_t choices, unsigned experts) {
    const int64_t shares = experts > 1 ? (int64_t)experts * (experts - 1) / 2 : 1;
    int64_t left = choices;
    for (unsigned expert = 0; expert < experts; ++expert) {
        rows[expert] = expert + 1 == experts ? left : choices * expert / shares;
        left -= rows[expert];
    }
}

// The first row of each expert, and the end of the last one.
static void place_rows(int32_t *starts, const int32_t *rows, unsigned experts) {
    starts[0] = 0;
    for (unsigned expert = 0; expert < experts; ++expert) starts[expert + 1] = starts[expert] + rows[expert];
}

// Adds up hashes of names and grids: two threads launch, and their order among each other is not always the same.
API int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, unsigned block_z,
                       unsigned shared, void *stream, void **arguments, void **extra) {
    const unsigned grid[] = {x, y, z}, block[] = {block_x, block_y, block_z};
    if (!x || !y || !z) return 1; // CUDA_ERROR_INVALID_VALUE, as from a card
    record_kernel(function, grid, block, shared, stream, arguments);
    if (!strcmp(function, "ecount_rows")) count_rows(*(int32_t **)arguments[0], *(int64_t *)arguments[2], x);
    if (!strcmp(function, "eplace_rows")) place_rows(*(int32_t **)arguments[3], *(int32_t **)arguments[5], x);
    uint64_t hash = 14695981039346656037u;
    for (; *function; ++function) hash = (hash ^ (unsigned char)*function) * 1099511628211u;
    for (int axis = 0; axis < 3; ++axis) hash = (hash ^ grid[axis]) * 1099511628211u;
    return submit(LAUNCHES, (int64_t)hash);
}

struct launch_config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
API int cuLaunchKernelEx(const struct launch_config *config, const char *function, void **arguments, void **extra) {
    const unsigned *grid = config->grid, *block = config->block;
    return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared, config->stream, arguments, extra);
}

API int cuStreamBeginCapture_v2(void *stream, int mode) { recorded = calloc(OF_GRAPHS, sizeof *recorded); return 0; }
API int cuStreamEndCapture(void *stream, void **graph) { *graph = recorded, recorded = 0; return 0; }
API int cuGraphInstantiateWithFlags(void **executable, const void *graph, unsigned long long flags) {
    *executable = memcpy(malloc(OF_GRAPHS * sizeof *recorded), graph, OF_GRAPHS * sizeof *recorded);
    return 0;
}
SUCCEEDS(cuGraphUpload)
API int cuGraphLaunch(const int64_t *executable, void *stream) {
    for (int which = 0; which < OF_GRAPHS; ++which) add(which, executable[which]);
    return add(SUBMITTED, 1);
}

API int cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream) {
    record_copy(stream, "copy of rows", copy->to_kind == 1 ? 0 : copy->to_device, copy->from_kind == 1 ? 0 : copy->from_device,
                copy->width * copy->height);
    const char *from = copy->from_kind == 1 ? copy->from_host : (const char *)copy->from_device;
    char *to = copy->to_kind == 1 ? copy->to_host : (char *)copy->to_device;
    from += copy->from_y * copy->from_pitch + copy->from_x, to += copy->to_y * copy->to_pitch + copy->to_x;
    for (size_t row = 0; row < copy->height; ++row)
        memcpy(to + row * copy->to_pitch, from + row * copy->from_pitch, copy->width);
    return 0;
}

SUCCEEDS(cuInit) SUCCEEDS(cuCtxPushCurrent_v2) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSynchronize) SUCCEEDS(cuCtxRecordEvent)
SUCCEEDS(cuCtxWaitEvent) SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuMemPoolSetAttribute) SUCCEEDS(cuMemPoolTrimTo)
SUCCEEDS(cuEventRecord) SUCCEEDS(cuEventSynchronize) SUCCEEDS(cuEventQuery) SUCCEEDS(cuStreamSynchronize)
SUCCEEDS(cuStreamWaitEvent) SUCCEEDS(cuFuncSetAttribute)
API int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
    record_copy(stream, "fill", to, 0, bytes);
    return 0;
}
API int cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream) {
    record_copy(stream, "fill", to, 0, 4 * count);
    return 0;
}
DESTROYS(cuGraphDestroy) DESTROYS(cuGraphExecDestroy) DESTROYS(cuEventDestroy_v2) DESTROYS(cuStreamDestroy_v2) DESTROYS(cuModuleUnload) DESTROYS(cuMemFreeHost)
SUCCEEDS(cuMemHostUnregister)

// ----------------------------------------------------------------------------------------------------------- cuBLASLt

API int cublasLtCreate(void **object) { *object = malloc(16); return 0; }
API int cublasLtMatmulDescCreate(void **object, unsigned compute, unsigned scale) {
    struct description *new = calloc(1, sizeof *new);
    new->compute = compute, *object = new;
    return 0;
}
API int cublasLtMatmulDescSetAttribute(void *object, unsigned attribute, const void *value, size_t bytes) {
    describe(object, attribute, value, bytes);
    return 0;
}
API int cublasLtMatrixLayoutCreate(void **object, unsigned type, uint64_t rows, uint64_t columns, int64_t leading) {
    struct layout *new = malloc(sizeof *new);
    *new = (struct layout){type, rows, columns, leading}, *object = new;
    return 0;
}
API int cublasLtMatmulPreferenceCreate(void **object) { *object = malloc(16); return 0; }
// One algorithm that needs no workspace.
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int most, void *results, int *found) {
    memset(results, 0, 96), *found = 1;
    return 0;
}
API int cublasLtMatmul(void *handle, const struct description *description, const float *alpha, const void *a, const struct layout *a_layout,
                       const void *b, const struct layout *b_layout, const float *beta, const void *c, const struct layout *c_layout,
                       void *d, const struct layout *d_layout, const void *algorithm, void *workspace, size_t bytes, void *stream) {
    if (begin(stream, "gemm")) {
        put_matrix("d", d_layout, d);
        put(" = %g", *alpha);
        put_matrix("a", a_layout, a), put_matrix("b", b_layout, b);
        put(" + %g", *beta);
        put_matrix("c", c_layout, c);
        put(" compute %u", description->compute);
        for (unsigned index = 0; index < description->count; ++index) {
            put(" %u =", description->of[index].attribute);
            put_word(description->of[index].value);
        }
        end();
    }
    return submit(GEMMS, 0);
}
API size_t cublasLtGetVersion(void) { return 130002; }
API const char *cublasLtGetStatusName(int status) { return "STATUS_OF_NULL_CUDA"; }
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
DESTROYS(cublasLtDestroy) DESTROYS(cublasLtMatmulDescDestroy) DESTROYS(cublasLtMatrixLayoutDestroy)
DESTROYS(cublasLtMatmulPreferenceDestroy)

// -------------------------------------------------------------------------------------------------------------- cuDNN

API size_t cudnnGetVersion(void) { return 91800; }
API const char *cudnnGetErrorString(int status) { return "STATUS_OF_NULL_CUDA"; }
API void cudnnGetLastErrorString(char *text, size_t bytes) { text[0] = 0; }
API int cudnnCreate(void **handle) { *handle = calloc(1, sizeof(void *)); return 0; }
API int cudnnSetStream(void **handle, void *stream) { *handle = stream; return 0; }
API int cudnnBackendCreateDescriptor(int kind, void **descriptor) {
    struct descriptor *new = calloc(1, sizeof *new);
    new->hash = 14695981039346656037u + kind, *descriptor = new;
    return 0;
}
API int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values) {
    set_attribute(descriptor, name, type, count, values);
    return 0;
}
// One engine, which is that of the graph it was asked for, and no workspace.
API int cudnnBackendGetAttribute(struct descriptor *descriptor, int name, int type, int64_t most, int64_t *found, void *values) {
    *found = 1;
    if (type == 3 && values) *(int64_t *)values = 0; // CUDNN_TYPE_INT64
    if (type == 15 && values) (*(struct descriptor **)values)->hash = descriptor->hash; // CUDNN_TYPE_BACKEND_DESCRIPTOR
    return 0;
}
API int cudnnBackendExecute(void **handle, const struct descriptor *plan, const struct descriptor *pack) {
    record_attention(*handle, plan, pack);
    return submit(ATTENTIONS, 0);
}
SUCCEEDS(cudnnBackendFinalize)
DESTROYS(cudnnDestroy) DESTROYS(cudnnBackendDestroyDescriptor)

// -------------------------------------------------------------------------------------------------------------- NVRTC

// One size for both.
static const char MACHINE_CODE[] = "engine", PTX[] = "burn__";

API int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
API int nvrtcCreateProgram(void **program) { *program = malloc(16); return 0; }
API int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
API int nvrtcGetProgramLog(void *program, char *text) { *text = 0; return 0; }
API int nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = sizeof PTX; return 0; }
API int nvrtcGetPTX(void *program, char *image) { memcpy(image, PTX, sizeof PTX); return 0; }
API int nvrtcGetCUBINSize(void *program, size_t *bytes) { return nvrtcGetPTXSize(program, bytes); }
API int nvrtcGetCUBIN(void *program, char *image) { memcpy(image, MACHINE_CODE, sizeof MACHINE_CODE); return 0; }
API int nvrtcDestroyProgram(void **program) { free(*program); return 0; }
API const char *nvrtcGetErrorString(int status) { return "ERROR_OF_NULL_CUDA"; }
SUCCEEDS(nvrtcCompileProgram)
