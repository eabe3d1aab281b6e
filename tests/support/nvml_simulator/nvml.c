/*
 * A libnvidia-ml.so.1 without a driver: the part of NVML that pytest_gpucluster reads, answered from a scenario file.
 *
 * The file named by the environment variable FAKE_NVML is read again as soon as it is another one, so that a test can plant
 * a fault while a process runs. One "key value" a line; a key may begin with a GPU's number, which beats the bare key. The keys
 * stand beside their functions below. Without a key a GPU is one of eight healthy H200: what it answers stands in HEALTHY,
 * which is made of the table of readings (healthy.h), or beside the function. A numbered field that is there is planted by
 * "field.270 4". A call of the table that is missing here, and gives one number, is made too (getters.h), with its name as
 * its key. Two keys hold for every call:
 *
 *   3.err.nvmlDeviceGetTemperature 15    this call on GPU 3 returns NVML's error 15 (without "3.": on every GPU)
 *   3.err 15                             every call on GPU 3 does, as when it has fallen off the bus
 *   delay_ms 5000                        every call takes 5 s, as on a driver that hangs
 *   delay_ms.nvmlDeviceGetSerial 5000    this one does
 *
 * Function names in keys are NVML's, without _v2 and the like. Types and numbers are those of the public nvml.h.
 */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { INSUFFICIENT_SIZE = 7, TIMEOUT = 10, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 16, KEY_LENGTH = 96, VALUE_LENGTH = 128, NODE = -1, EVENT_XID = 0x8 };

typedef int Return;
typedef struct { int index; } Gpu;
typedef Gpu *Device;

static Gpu gpus[MAX_GPUS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}};
static const unsigned buses[MAX_GPUS] = {0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf,
                                         0xe1, 0xe3, 0xe5, 0xe7, 0xe9, 0xeb, 0xed, 0xef};

static const struct { const char *name, *answer; } HEALTHY[] = {
#include "healthy.h"
};

/* --- The scenario --- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *scenario;
static struct stat scenario_file;

/* Read the scenario again if its file is another one than before: a test may plant a fault while a process runs. */
static void refresh(void)
{
    const char *path = getenv("FAKE_NVML");
    struct stat now = {0};
    FILE *file;
    size_t length;

    if (path && !stat(path, &now) && scenario && now.st_ino == scenario_file.st_ino && now.st_size == scenario_file.st_size &&
        !memcmp(&now.st_mtim, &scenario_file.st_mtim, sizeof now.st_mtim))
        return;
    free(scenario);
    scenario = calloc(1, (size_t)now.st_size + 2);
    scenario_file = now;
    file = path ? fopen(path, "r") : NULL;
    scenario[0] = '\n';
    length = file ? fread(scenario + 1, 1, (size_t)now.st_size, file) : 0;
    scenario[length + 1] = 0;
    if (file)
        fclose(file);
}

/* A new session reads the scenario again whatever the clock of the file system says. */
static void forget(void)
{
    pthread_mutex_lock(&lock);
    free(scenario);
    scenario = NULL;
    pthread_mutex_unlock(&lock);
}

static int find(const char *key, char *value)
{
    char start[KEY_LENGTH + 2];
    const char *line;

    snprintf(start, sizeof start, "\n%s ", key);
    pthread_mutex_lock(&lock);
    refresh();
    line = strstr(scenario, start);
    if (line) {
        line += strlen(start);
        snprintf(value, VALUE_LENGTH, "%.*s", (int)strcspn(line, "\r\n"), line);
    }
    pthread_mutex_unlock(&lock);
    return line != NULL;
}

static int look(int gpu, const char *key, char *value)
{
    char own[KEY_LENGTH];

    snprintf(own, sizeof own, "%d.%s", gpu, key);
    return (gpu != NODE && find(own, value)) || find(key, value);
}

static long long number(int gpu, const char *key, long long otherwise)
{
    char value[VALUE_LENGTH];

    return look(gpu, key, value) ? strtoll(value, NULL, 0) : otherwise;
}

static void text(int gpu, const char *key, const char *otherwise, char *out, unsigned size)
{
    char value[VALUE_LENGTH];

    snprintf(out, size, "%s", look(gpu, key, value) ? value : otherwise);
}

/* What a healthy GPU answers to a call, or as a numbered field ("field.230"); NULL where the table of readings has nothing. */
static const char *healthy(const char *name)
{
    for (unsigned at = 0; at < sizeof HEALTHY / sizeof *HEALTHY; at++)
        if (!strcmp(HEALTHY[at].name, name))
            return HEALTHY[at].answer;
    return NULL;
}

static long long healthy_number(const char *name)
{
    const char *answer = healthy(name);

    return answer ? strtoll(answer, NULL, 0) : 0;
}

/* The error planted on this call, else SUCCESS; "err" alone is for GPUs only. */
static Return planted(int gpu, const char *function)
{
    char key[KEY_LENGTH];
    long long delay_ms;
    Return error;

    snprintf(key, sizeof key, "delay_ms.%s", function);
    delay_ms = number(gpu, key, number(gpu, "delay_ms", 0));
    if (delay_ms > 0)
        usleep((useconds_t)(delay_ms * 1000));
    snprintf(key, sizeof key, "err.%s", function);
    error = (Return)number(gpu, key, SUCCESS);
    return error == SUCCESS && gpu != NODE ? (Return)number(gpu, "err", SUCCESS) : error;
}

#define CHECK(gpu, function)                            \
    do {                                                \
        Return planted_error = planted(gpu, function);  \
        if (planted_error != SUCCESS)                   \
            return planted_error;                       \
    } while (0)

/* A getter of one number. */
#define GETTER(function, type, key)                                             \
    Return function(Device device, type *value)                                 \
    {                                                                           \
        CHECK(device->index, #function);                                        \
        *value = (type)number(device->index, key, healthy_number(#function));   \
        return SUCCESS;                                                         \
    }

#include "getters.h"

/* --- The library and the node --- */

Return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    forget();
    CHECK(NODE, "nvmlInit");
    return (Return)number(NODE, "init", SUCCESS);
}

Return nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

Return nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(Return error)
{
    switch (error) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

Return nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    CHECK(NODE, "nvmlSystemGetDriverVersion");
    text(NODE, "driver", "570.133.20", version, size);
    return SUCCESS;
}

/* driver.cuda 12080: CUDA 12.8 */
Return nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    CHECK(NODE, "nvmlSystemGetCudaDriverVersion_v2");
    *version = (int)number(NODE, "driver.cuda", 12080);
    return SUCCESS;
}

Return nvmlDeviceGetCount_v2(unsigned *count)
{
    CHECK(NODE, "nvmlDeviceGetCount");
    *count = (unsigned)number(NODE, "count", 8);
    return SUCCESS;
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    unsigned count = (unsigned)number(NODE, "count", 8);

    if (index >= count || index >= MAX_GPUS)
        return INVALID_ARGUMENT;
    CHECK((int)index, "nvmlDeviceGetHandleByIndex");
    *device = &gpus[index];
    return SUCCESS;
}

/* --- Who a GPU is --- */

Return nvmlDeviceGetName(Device device, char *name, unsigned size)
{
    CHECK(device->index, "nvmlDeviceGetName");
    text(device->index, "name", healthy("nvmlDeviceGetName"), name, size);
    return SUCCESS;
}

Return nvmlDeviceGetUUID(Device device, char *uuid, unsigned size)
{
    char usual[64];

    CHECK(device->index, "nvmlDeviceGetUUID");
    snprintf(usual, sizeof usual, "GPU-%08x-0000-0000-0000-%012x", device->index, device->index);
    text(device->index, "uuid", usual, uuid, size);
    return SUCCESS;
}

Return nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
    unsigned count = (unsigned)number(NODE, "count", 8);

    for (unsigned index = 0; index < count && index < MAX_GPUS; index++) {
        char own[VALUE_LENGTH];
        if (nvmlDeviceGetUUID(&gpus[index], own, sizeof own) == SUCCESS && !strcmp(own, uuid)) {
            *device = &gpus[index];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

Return nvmlDeviceGetSerial(Device device, char *serial, unsigned size)
{
    char usual[32];

    CHECK(device->index, "nvmlDeviceGetSerial");
    snprintf(usual, sizeof usual, "16540240%05d", device->index);
    text(device->index, "serial", usual, serial, size);
    return SUCCESS;
}

Return nvmlDeviceGetVbiosVersion(Device device, char *version, unsigned size)
{
    CHECK(device->index, "nvmlDeviceGetVbiosVersion");
    text(device->index, "vbios", healthy("nvmlDeviceGetVbiosVersion"), version, size);
    return SUCCESS;
}

typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;

Return nvmlDeviceGetPciInfo_v3(Device device, Pci *pci)
{
    CHECK(device->index, "nvmlDeviceGetPciInfo");
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)number(device->index, "pci.bus", buses[device->index]);
    pci->device_id = 0x233510de;
    snprintf(pci->legacy_bus_id, sizeof pci->legacy_bus_id, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}

/* current and pending mode: both as planted */
#define MODE(function, key)                                                                 \
    Return function(Device device, unsigned *current, unsigned *pending)                    \
    {                                                                                       \
        CHECK(device->index, #function);                                                    \
        *current = *pending = (unsigned)number(device->index, key, healthy_number(#function)); \
        return SUCCESS;                                                                     \
    }

MODE(nvmlDeviceGetMigMode, "mig")
MODE(nvmlDeviceGetEccMode, "ecc")
GETTER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
GETTER(nvmlDeviceGetComputeMode, unsigned, "compute.mode")

/* module 1 to 8 */
Return nvmlDeviceGetModuleId(Device device, unsigned *module)
{
    CHECK(device->index, "nvmlDeviceGetModuleId");
    *module = (unsigned)number(device->index, "module", device->index + 1);
    return SUCCESS;
}

Return nvmlDeviceGetBoardPartNumber(Device device, char *part, unsigned size)
{
    CHECK(device->index, "nvmlDeviceGetBoardPartNumber");
    text(device->index, "part", healthy("nvmlDeviceGetBoardPartNumber"), part, size);
    return SUCCESS;
}

typedef struct {
    unsigned version;
    unsigned char guid[16], chassis[16];
    unsigned char slot, tray, host, peer, module;
} Platform;

/* "platform 1821924190012 3 2 1": serial number of the chassis, slot, tray, host; as an H200 without: none, 0, 0, 1 */
Return nvmlDeviceGetPlatformInfo(Device device, Platform *platform)
{
    char value[VALUE_LENGTH], serial[17] = "";
    unsigned slot = 0, tray = 0, host = 1;

    CHECK(device->index, "nvmlDeviceGetPlatformInfo");
    if (look(device->index, "platform", value) && sscanf(value, "%16s %u %u %u", serial, &slot, &tray, &host) != 4)
        return INVALID_ARGUMENT;
    memset(platform->chassis, 0, sizeof platform->chassis);
    memcpy(platform->chassis, serial, strlen(serial));
    platform->slot = (unsigned char)slot;
    platform->tray = (unsigned char)tray;
    platform->host = (unsigned char)host;
    return SUCCESS;
}

/* --- Memory --- */

typedef struct { unsigned long long total, free, used; } Memory;

Return nvmlDeviceGetMemoryInfo(Device device, Memory *memory)
{
    CHECK(device->index, "nvmlDeviceGetMemoryInfo");
    memory->total = (unsigned long long)number(device->index, "mem.total", 150754820096LL);
    memory->used = (unsigned long long)(number(device->index, "mem.used", 4LL << 20) +
                                        number(device->index, "mem.reserved", 600LL << 20));
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;

/* Drivers before 510 do not have it: err.nvmlDeviceGetMemoryInfo_v2 13 */
Return nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory)
{
    CHECK(device->index, "nvmlDeviceGetMemoryInfo_v2");
    CHECK(device->index, "nvmlDeviceGetMemoryInfo");
    memory->total = (unsigned long long)number(device->index, "mem.total", 150754820096LL);
    memory->used = (unsigned long long)number(device->index, "mem.used", 4LL << 20);
    memory->reserved = (unsigned long long)number(device->index, "mem.reserved", 600LL << 20);
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

/* ecc.cor.vol, ecc.cor.agg, ecc.unc.vol, ecc.unc.agg: 0 */
Return nvmlDeviceGetTotalEccErrors(Device device, int uncorrected, int aggregate, unsigned long long *count)
{
    char key[KEY_LENGTH];

    CHECK(device->index, "nvmlDeviceGetTotalEccErrors");
    snprintf(key, sizeof key, "ecc.%s.%s", uncorrected ? "unc" : "cor", aggregate ? "agg" : "vol");
    *count = (unsigned long long)number(device->index, key, 0);
    return SUCCESS;
}

Return nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                 unsigned *failed)
{
    CHECK(device->index, "nvmlDeviceGetRemappedRows");
    *corrected = (unsigned)number(device->index, "remap.cor", 0);
    *uncorrected = (unsigned)number(device->index, "remap.unc", 0);
    *pending = (unsigned)number(device->index, "remap.pending", 0);
    *failed = (unsigned)number(device->index, "remap.failed", 0);
    return SUCCESS;
}

typedef struct { unsigned max, high, partial, low, none; } SpareRows;

/* Banks of memory by the spare rows that they have left: spare.max 2560, spare.high, spare.partial, spare.low, spare.none 0 */
Return nvmlDeviceGetRowRemapperHistogram(Device device, SpareRows *rows)
{
    CHECK(device->index, "nvmlDeviceGetRowRemapperHistogram");
    rows->max = (unsigned)number(device->index, "spare.max", 2560);
    rows->high = (unsigned)number(device->index, "spare.high", 0);
    rows->partial = (unsigned)number(device->index, "spare.partial", 0);
    rows->low = (unsigned)number(device->index, "spare.low", 0);
    rows->none = (unsigned)number(device->index, "spare.none", 0);
    return SUCCESS;
}

typedef struct { unsigned long long reference, violation; } Violation;

/* Nanoseconds by the number of the policy: violation.0 (power), violation.1 (thermal), ...: 0 */
Return nvmlDeviceGetViolationStatus(Device device, unsigned policy, Violation *status)
{
    char key[KEY_LENGTH];

    CHECK(device->index, "nvmlDeviceGetViolationStatus");
    snprintf(key, sizeof key, "violation.%u", policy);
    status->reference = 0;
    status->violation = (unsigned long long)number(device->index, key, 0);
    return SUCCESS;
}

typedef struct { unsigned version, channel, tpc; } Repair;

/* repair.channel 0, repair.tpc 0 */
Return nvmlDeviceGetRepairStatus(Device device, Repair *repair)
{
    CHECK(device->index, "nvmlDeviceGetRepairStatus");
    repair->channel = (unsigned)number(device->index, "repair.channel", 0);
    repair->tpc = (unsigned)number(device->index, "repair.tpc", 0);
    return SUCCESS;
}

typedef struct { unsigned version, flag; } Unrepairable;

/* unrepairable 0 */
Return nvmlDeviceGetUnrepairableMemoryFlag_v1(Device device, Unrepairable *memory)
{
    CHECK(device->index, "nvmlDeviceGetUnrepairableMemoryFlag_v1");
    memory->flag = (unsigned)number(device->index, "unrepairable", 0);
    return SUCCESS;
}

typedef struct { unsigned version; unsigned long long counters[11]; unsigned threshold_exceeded; } Sram;

/* sram.threshold 0 */
Return nvmlDeviceGetSramEccErrorStatus(Device device, Sram *sram)
{
    CHECK(device->index, "nvmlDeviceGetSramEccErrorStatus");
    if (sram->version != (sizeof *sram | 1 << 24))
        return VERSION_MISMATCH;
    memset(sram->counters, 0, sizeof sram->counters);
    sram->threshold_exceeded = (unsigned)number(device->index, "sram.threshold", 0);
    return SUCCESS;
}

/* --- Links --- */

GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie.gen")
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie.gen.max")
GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie.width")
GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie.width.max")
GETTER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie.replay")

/* nvlink.0 to nvlink.17: 1 */
Return nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active)
{
    char key[KEY_LENGTH];

    CHECK(device->index, "nvmlDeviceGetNvLinkState");
    if (link >= 18)
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "nvlink.%u", link);
    *active = (unsigned)number(device->index, key, 1);
    return SUCCESS;
}

/* nvlink.0.replay, nvlink.0.recovery, nvlink.0.crc_flit, nvlink.0.crc_data, nvlink.0.ecc_data and so on: 0 */
Return nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, int counter, unsigned long long *value)
{
    static const char *const names[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data"};
    char key[KEY_LENGTH];

    CHECK(device->index, "nvmlDeviceGetNvLinkErrorCounter");
    if (link >= 18 || counter < 0 || counter > 4)
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "err.nvlink.%u.%s", link, names[counter]);
    if (number(device->index, key, SUCCESS) != SUCCESS)
        return (Return)number(device->index, key, SUCCESS);
    snprintf(key, sizeof key, "nvlink.%u.%s", link, names[counter]);
    *value = (unsigned long long)number(device->index, key, 0);
    return SUCCESS;
}

/* nvlink.end 2: a switch; 0: a GPU */
Return nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, int *kind)
{
    CHECK(device->index, "nvmlDeviceGetNvLinkRemoteDeviceType");
    if (link >= 18)
        return INVALID_ARGUMENT;
    *kind = (int)number(device->index, "nvlink.end", 2);
    return SUCCESS;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health_mask;
    unsigned char health_summary;
} Fabric;

/*
 * fabric.state 3, fabric.status 0, fabric.clique 0, fabric.cluster 0 (the first byte), fabric.health 0, fabric.summary 0;
 * fabric.version 3: the newest version of the structure that the driver knows
 */
Return nvmlDeviceGetGpuFabricInfoV(Device device, Fabric *fabric)
{
    CHECK(device->index, "nvmlDeviceGetGpuFabricInfoV");
    if (fabric->version >> 24 > (unsigned)number(device->index, "fabric.version", 3))
        return VERSION_MISMATCH;
    memset(fabric->cluster, 0, sizeof fabric->cluster);
    fabric->cluster[0] = (unsigned char)number(device->index, "fabric.cluster", 0);
    fabric->status = (unsigned)number(device->index, "fabric.status", SUCCESS);
    fabric->clique = (unsigned)number(device->index, "fabric.clique", 0);
    fabric->state = (unsigned char)number(device->index, "fabric.state", 3);
    fabric->health_mask = (unsigned)number(device->index, "fabric.health", 0);
    if (fabric->version >> 24 > 2)
        fabric->health_summary = (unsigned char)number(device->index, "fabric.summary", 0);
    return SUCCESS;
}

/* --- Numbered fields; err.field.164 3 refuses one of them --- */

typedef struct {
    unsigned id, scope;
    long long timestamp, latency_us;
    int type;
    Return error;
    union { unsigned number; unsigned long long wide; } value;
} Field;

enum { FIELD_MEMORY_TEMPERATURE = 82, FIELD_NVLINK_SPEED = 164, FIELD_RECOVERY_ACTION = 230 };
enum { FIELD_NVLINK_TX = 138, FIELD_NVLINK_RX = 139, FIELD_PCIE_TX = 197, FIELD_PCIE_RX = 198 };
enum { FIELD_PCIE_RECOVERIES = 169, FIELD_PCIE_ERRORS_FIRST = 173, FIELD_PCIE_ERRORS_LAST = 183 };
enum { FIELD_NVLINK5_FIRST = 206, FIELD_NVLINK5_LAST = 222, FIELD_EFFECTIVE_BER = 220, FIELD_SYMBOL_BER = 222 };
enum { TYPE_UNSIGNED = 1, TYPE_WIDE = 3 };
enum { BER_OF_NOTHING = 0xfff };

/* A counter of a link: those of the NVLinks are asked for all links at once, by the highest scope. */
static void count(int gpu, Field *field, const char *key)
{
    int is_nvlink = field->id == FIELD_NVLINK_TX || field->id == FIELD_NVLINK_RX;

    if (is_nvlink && field->scope != 0xffffffff)
        field->error = INVALID_ARGUMENT;
    field->type = TYPE_WIDE;
    field->value.wide = (unsigned long long)number(gpu, key, 0);
}

/* What an NVLink of generation 5 counts: nvlink.3.field.221 4, and 0xfff for its error rates; others refuse. nvlink5 0 */
static void count5(int gpu, Field *field)
{
    int is_rate = field->id == FIELD_EFFECTIVE_BER || field->id == FIELD_SYMBOL_BER;
    char key[KEY_LENGTH];

    if (!number(gpu, "nvlink5", 0)) {
        field->error = NOT_SUPPORTED;
        return;
    }
    snprintf(key, sizeof key, "nvlink.%u.field.%u", field->scope, field->id);
    field->type = TYPE_WIDE;
    field->value.wide = (unsigned long long)number(gpu, key, is_rate ? BER_OF_NOTHING : 0);
}

/* What a PCIe link counts besides its replays: pcie.field.173 4 */
static void count_pcie(int gpu, Field *field)
{
    char key[KEY_LENGTH];

    snprintf(key, sizeof key, "pcie.field.%u", field->id);
    field->value.number = (unsigned)number(gpu, key, 0);
}

/*
 * A field of the table of readings: field.270 4, and some by another key: nvlink.0.speed (MB/s), recovery, temp.mem. Others
 * are unknown to this driver.
 */
static void read_field(int gpu, Field *field)
{
    char name[KEY_LENGTH], key[KEY_LENGTH];

    snprintf(name, sizeof name, "field.%u", field->id);
    switch (field->id) {
    case FIELD_NVLINK_SPEED: snprintf(key, sizeof key, "nvlink.%u.speed", field->scope); break;
    case FIELD_RECOVERY_ACTION: strcpy(key, "recovery"); break;
    case FIELD_MEMORY_TEMPERATURE: strcpy(key, "temp.mem"); break;
    default: strcpy(key, name);
    }
    if (!healthy(name))
        field->error = INVALID_ARGUMENT;
    field->value.number = (unsigned)number(gpu, key, healthy_number(name));
}

/* nvlink.tx and nvlink.rx, in KiB: 0; pcie.tx and pcie.rx, in bytes: 0. Of all fields: field.type 0 (double), field.bits 0x7ff8... */
static void answer(int gpu, Field *field)
{
    char key[KEY_LENGTH];

    snprintf(key, sizeof key, "err.field.%u", field->id);
    field->error = (Return)number(gpu, key, SUCCESS);
    field->type = TYPE_UNSIGNED;
    switch (field->id) {
    case FIELD_NVLINK_TX: count(gpu, field, "nvlink.tx"); break;
    case FIELD_NVLINK_RX: count(gpu, field, "nvlink.rx"); break;
    case FIELD_PCIE_TX: count(gpu, field, "pcie.tx"); break;
    case FIELD_PCIE_RX: count(gpu, field, "pcie.rx"); break;
    default:
        if (field->id >= FIELD_NVLINK5_FIRST && field->id <= FIELD_NVLINK5_LAST)
            count5(gpu, field);
        else if (field->id >= FIELD_PCIE_ERRORS_FIRST && field->id <= FIELD_PCIE_ERRORS_LAST)
            count_pcie(gpu, field);
        else if (field->id == FIELD_PCIE_RECOVERIES)
            count_pcie(gpu, field);
        else
            read_field(gpu, field);
    }
    field->type = (int)number(gpu, "field.type", field->type);
    field->value.wide = (unsigned long long)number(gpu, "field.bits", (long long)field->value.wide);
}

Return nvmlDeviceGetFieldValues(Device device, int count, Field *fields)
{
    CHECK(device->index, "nvmlDeviceGetFieldValues");
    for (int index = 0; index < count; index++)
        answer(device->index, &fields[index]);
    return SUCCESS;
}

/* --- What it does right now --- */

GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle")
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle")

/* clock.sm 1980, clock.mem 3201 */
Return nvmlDeviceGetClockInfo(Device device, int kind, unsigned *mhz)
{
    CHECK(device->index, "nvmlDeviceGetClockInfo");
    *mhz = (unsigned)(kind == 2 ? number(device->index, "clock.mem", 3201) : number(device->index, "clock.sm", 1980));
    return SUCCESS;
}

Return nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius)
{
    (void)sensor;
    CHECK(device->index, "nvmlDeviceGetTemperature");
    *celsius = (unsigned)number(device->index, "temp", healthy_number("nvmlDeviceGetTemperature"));
    return SUCCESS;
}

GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power.default_mw")
GETTER(nvmlDeviceGetPowerUsage, unsigned, "power_mw")
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power.limit_mw")

typedef struct { unsigned gpu, memory; } Utilization;

/* util 0 */
Return nvmlDeviceGetUtilizationRates(Device device, Utilization *rates)
{
    CHECK(device->index, "nvmlDeviceGetUtilizationRates");
    rates->gpu = (unsigned)number(device->index, "util", 0);
    rates->memory = rates->gpu / 2;
    return SUCCESS;
}

/*
 * --- Processes: "3.process.0 <pid> <bytes>" to process.7, bytes -1: not told; "program.<pid> /usr/bin/python3" ---
 *
 * "processes <folder>": each file "<gpu>.<pid>" in it is one more, with 612 MiB, from the moment it is made until it is
 * removed. A file "<gpu>.<pid>.live" is one while a process of this pid lives.
 */

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;

enum { MAX_PROCESSES = 16 };

/* How many processes the folder shows on a GPU; they are appended to those found before. */
static unsigned in_folder(int gpu, Process *all, unsigned found)
{
    char folder[VALUE_LENGTH];
    struct dirent *entry;
    DIR *files = find("processes", folder) ? opendir(folder) : NULL;

    while (files && found < MAX_PROCESSES && (entry = readdir(files))) {
        int on, length = 0;
        unsigned pid;
        if (sscanf(entry->d_name, "%d.%u%n", &on, &pid, &length) != 2 || on != gpu)
            continue;
        if (!strcmp(entry->d_name + length, ".live") && kill((pid_t)pid, 0))
            continue;
        all[found++] = (Process){pid, 612ULL << 20, 0xffffffff, 0xffffffff};
    }
    if (files)
        closedir(files);
    return found;
}

/* "process.0 4711 1073741824" and so on; of MPS "mps.0 4711 1073741824" */
static Return list(int gpu, const char *kind, unsigned *count, Process *processes)
{
    char key[KEY_LENGTH], value[VALUE_LENGTH];
    Process all[MAX_PROCESSES];
    unsigned room = *count, found = 0;

    for (; found < 8; found++) {
        long long pid, bytes;
        snprintf(key, sizeof key, "%s.%u", kind, found);
        if (!look(gpu, key, value) || sscanf(value, "%lld %lld", &pid, &bytes) != 2)
            break;
        all[found] = (Process){(unsigned)pid, (unsigned long long)bytes, 0xffffffff, 0xffffffff};
    }
    if (!strcmp(kind, "process"))
        found = in_folder(gpu, all, found);
    if (processes)
        memcpy(processes, all, (found < room ? found : room) * sizeof *all);
    *count = found;
    return found > (processes ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

Return nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *processes)
{
    CHECK(device->index, "nvmlDeviceGetComputeRunningProcesses");
    return list(device->index, "process", count, processes);
}

Return nvmlDeviceGetMPSComputeRunningProcesses_v3(Device device, unsigned *count, Process *processes)
{
    CHECK(device->index, "nvmlDeviceGetMPSComputeRunningProcesses");
    return list(device->index, "mps", count, processes);
}

Return nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    char key[KEY_LENGTH], value[VALUE_LENGTH];

    CHECK(NODE, "nvmlSystemGetProcessName");
    snprintf(key, sizeof key, "program.%u", pid);
    if (!find(key, value))
        return NOT_FOUND;
    snprintf(name, size, "%s", value);
    return SUCCESS;
}

/*
 * --- Events: "xids 3:79 0:48" is what happened since the driver was loaded: GPU and code, in that order. What is appended
 * while a set waits is delivered to it, one by one; what was there when the set was made is past.
 */

typedef struct {
    unsigned delivered;
    unsigned long long registered[MAX_GPUS];
} EventSet;
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

/* The xid with this number, counted from 0; 0 where there are not so many. */
static int xid_at(unsigned number, unsigned *gpu, unsigned long long *xid)
{
    char value[VALUE_LENGTH];
    char *word = find("xids", value) ? strtok(value, " ") : NULL;

    for (; word && number; number--)
        word = strtok(NULL, " ");
    return word && sscanf(word, "%u:%llu", gpu, xid) == 2 && *gpu < MAX_GPUS;
}

Return nvmlEventSetCreate(EventSet **set)
{
    unsigned gpu;
    unsigned long long xid;

    CHECK(NODE, "nvmlEventSetCreate");
    *set = calloc(1, sizeof **set);
    while (xid_at((*set)->delivered, &gpu, &xid))
        (*set)->delivered++;
    return SUCCESS;
}

Return nvmlEventSetFree(EventSet *set)
{
    free(set);
    return SUCCESS;
}

Return nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types)
{
    CHECK(device->index, "nvmlDeviceGetSupportedEventTypes");
    *types = EVENT_XID | 0x2 | 0x1;
    return SUCCESS;
}

Return nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet *set)
{
    CHECK(device->index, "nvmlDeviceRegisterEvents");
    set->registered[device->index] |= types;
    return SUCCESS;
}

Return nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms)
{
    unsigned gpu;
    unsigned long long xid;

    for (unsigned waited_ms = 0;; waited_ms += 50) {
        CHECK(NODE, "nvmlEventSetWait");
        while (xid_at(set->delivered, &gpu, &xid)) {
            set->delivered++;
            if (set->registered[gpu] & EVENT_XID) {
                *event = (Event){&gpus[gpu], EVENT_XID, xid, 0xffffffff, 0xffffffff};
                return SUCCESS;
            }
        }
        if (waited_ms >= timeout_ms)
            return TIMEOUT;
        usleep(50000);
    }
}
