/* A library with the calls of NVML that sampling uses, for three cards that answer with fixed numbers: usage.rs builds and loads it.
 * Layouts and numbers are those of nvml.h (CUDA 12), written here a second time, independently of the bindings under test. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, VERSION_MISMATCH = 25 };
enum { HOPPER = 1, AMPERE = 2, PARTITIONED = 3 };

typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned serial; } sample_t;
typedef struct {
    unsigned metric, result;
    double value;
    struct { char *short_name, *long_name, *unit; } info;
} metric_t;
typedef struct {
    unsigned version, count;
    sample_t *first, *second;
    metric_t metrics[98];
} metrics_get_t;
typedef struct { unsigned version, supported; } support_t;

static int cards[4] = {0, HOPPER, AMPERE, PARTITIONED};
static unsigned serial, live;
static uint64_t millijoules = 5000000;

int nvmlInit_v2(void) { return SUCCESS; }

/* A sample that is not given back is a bug of the caller. */
int nvmlShutdown(void) {
    if (live != 0) abort();
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    if (length < 8) return INVALID_ARGUMENT;
    strcpy(text, "580.0.0");
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, int **device) {
    static const char *names[4] = {"", "GPU-hopper", "GPU-ampere", "GPU-partitioned"};
    for (int card = HOPPER; card <= PARTITIONED; card++)
        if (strcmp(uuid, names[card]) == 0) {
            *device = &cards[card];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(int *device, unsigned *current, unsigned *pending) {
    *current = *pending = *device == PARTITIONED;
    return *device == AMPERE ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetUtilizationRates(int *device, utilization_t *rates) {
    if (*device == PARTITIONED) return NOT_SUPPORTED;
    *rates = (utilization_t){.gpu = 97, .memory = 33};
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(int *device, unsigned *milliwatts) { (void)device; *milliwatts = 612500; return SUCCESS; }
int nvmlDeviceGetTemperature(int *device, unsigned sensor, unsigned *celsius) {
    (void)device;
    *celsius = 61;
    return sensor == 0 ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetClockInfo(int *device, unsigned clock, unsigned *mhz) {
    (void)device;
    *mhz = clock == 1 ? 1755 : 0;
    return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(int *device, unsigned long long *total) {
    (void)device;
    *total = millijoules += 250000;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(int *device, unsigned long long *reasons) {
    /* Software power cap, and hardware thermal slowdown with the slowdown that it causes. */
    *reasons = *device == HOPPER ? 0x4 : 0x40 | 0x8;
    return SUCCESS;
}
int nvmlDeviceGetPcieThroughput(int *device, unsigned counter, unsigned *kilobytes) {
    (void)device;
    *kilobytes = counter == 0 ? 2000000 : 3000000;
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(int *device, support_t *support) {
    if (support->version != 1) return VERSION_MISMATCH;
    support->supported = *device != AMPERE;
    return SUCCESS;
}
int nvmlGpmSampleAlloc(sample_t **sample) {
    live++;
    *sample = calloc(1, sizeof(sample_t));
    return SUCCESS;
}
int nvmlGpmSampleFree(sample_t *sample) {
    live--;
    free(sample);
    return SUCCESS;
}
int nvmlGpmSampleGet(int *device, sample_t *sample) {
    if (*device == PARTITIONED) abort(); /* must not be asked */
    sample->serial = ++serial;
    return SUCCESS;
}
int nvmlGpmMetricsGet(metrics_get_t *get) {
    if (get->version != 1) return VERSION_MISMATCH;
    if (get->first->serial + 1 != get->second->serial) return INVALID_ARGUMENT; /* the last look and this one */
    for (unsigned i = 0; i < get->count; i++) {
        metric_t *metric = &get->metrics[i];
        metric->result = SUCCESS;
        switch (metric->metric) {
        case 2: metric->value = 88.5; break;    /* multiprocessors */
        case 5: metric->value = 61.25; break;   /* any tensor core */
        case 10: metric->value = 47.0; break;   /* memory bandwidth */
        case 20: metric->value = 1000.0; break; /* MiB/s to the host */
        case 21: metric->value = 2000.0; break; /* MiB/s from the host */
        default: metric->result = NOT_SUPPORTED; break;
        }
    }
    return SUCCESS;
}
