/* A stand-in for NVIDIA's libnvidia-ml.so.1 that returns the values of a script.
 *
 * The script is the file that FAKE_NVML names; it is read again whenever it has changed. A line is a key and a value:
 *
 *     count 2
 *     0.nvmlDeviceGetPowerUsage 312000
 *     0.field.138 8 3            second number: valueType, by default 3 (unsigned long long)
 *     0.field.138.4 9            of one scope, here link 4; a field without one is that of the card and of all links
 *     1.nvmlDeviceGetUUID !15    an error, here NVML_ERROR_GPU_IS_LOST
 *     1.* !15                    of every call about this card
 *     sleep_ms 5000              how long every call takes
 *     event 1 0 79               the first event: card 0, Xid 79
 *
 * Calls that the script does not name return NVML_ERROR_NOT_SUPPORTED. When "generation" changes, the driver was restarted: nothing
 * works before nvmlInit is called again. With FAKE_NVML_LOG every call is logged. MIG instances of card 0 are
 * cards 100, 101, ..., of card 1 cards 200, ...
 *
 * Layouts and numbers: nvml.h, as nvidia-ml-py has them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, MOST_CARDS = 1000 };
typedef struct { int number; } card_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type, result; unsigned long long value; } field_t;
typedef struct { card_t *card; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;

static card_t cards[MOST_CARDS];
static char script[1 << 16];
static struct timespec changed;
static ino_t inode;
static long initialized, generation, delivered;

static void load(void)
{
    const char *path = getenv("FAKE_NVML");
    struct stat now;
    if (path == NULL || stat(path, &now) != 0)
        return;
    if (now.st_ino == inode && memcmp(&now.st_mtim, &changed, sizeof changed) == 0)
        return;
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return;
    script[fread(script, 1, sizeof script - 1, file)] = '\0';
    fclose(file);
    changed = now.st_mtim;
    inode = now.st_ino;
}

/* The value of a key, up to the end of its line; NULL if it has none. */
static const char *find(const char *key)
{
    size_t length = strlen(key);
    for (const char *line = script; line != NULL && *line != '\0'; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (strncmp(line, key, length) == 0 && line[length] == ' ')
            return line + length + 1;
    return NULL;
}

static long number_of(const char *key)
{
    const char *value = find(key);
    return value == NULL ? 0 : atol(value);
}

static int begin(const char *function)
{
    load();
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *file = path == NULL ? NULL : fopen(path, "a");
    if (file != NULL) {
        fprintf(file, "%s\n", function);
        fclose(file);
    }
    long sleep_ms = number_of("sleep_ms");
    struct timespec pause = {sleep_ms / 1000, sleep_ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
    const char *all = find("*");
    if (all != NULL && *all == '!')
        return atoi(all + 1);
    return initialized && generation == number_of("generation") ? SUCCESS : UNINITIALIZED;
}

/* The value of a call, of any card (-1) or one; an error code otherwise. */
static int look(int card, const char *call, const char **value)
{
    char key[128];
    int result = begin(call);
    if (result != SUCCESS)
        return result;
    snprintf(key, sizeof key, "%d.*", card);
    const char *found = card < 0 ? NULL : find(key);
    if (found == NULL) {
        if (card < 0)
            snprintf(key, sizeof key, "%s", call);
        else
            snprintf(key, sizeof key, "%d.%s", card, call);
        found = find(key);
    }
    if (found == NULL)
        return NOT_SUPPORTED;
    if (*found == '!')
        return atoi(found + 1);
    *value = found;
    return SUCCESS;
}

static int text(int card, const char *call, char *out, unsigned size)
{
    const char *value;
    int result = look(card, call, &value);
    if (result == SUCCESS)
        snprintf(out, size, "%.*s", (int)strcspn(value, "\n"), value);
    return result;
}

static int number(card_t *card, const char *call, unsigned long long *out)
{
    const char *value;
    int result = look(card == NULL ? -1 : card->number, call, &value);
    if (result == SUCCESS)
        *out = strtoull(value, NULL, 0);
    return result;
}

static int number32(card_t *card, const char *call, unsigned *out)
{
    unsigned long long wide;
    int result = number(card, call, &wide);
    if (result == SUCCESS)
        *out = (unsigned)wide;
    return result;
}

static int numbered(card_t *card, const char *call, unsigned argument, unsigned long long *out)
{
    char name[96];
    snprintf(name, sizeof name, "%s.%u", call, argument);
    return number(card, name, out);
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    load();
    const char *result = find("init");
    if (result != NULL && *result == '!')
        return atoi(result + 1);
    initialized++;
    generation = number_of("generation");
    return SUCCESS;
}

int nvmlShutdown(void)
{
    if (initialized == 0)
        return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(int result) { (void)result; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(-1, "nvmlSystemGetDriverVersion", out, size); }
int nvmlSystemGetCudaDriverVersion(int *out) { return number32(NULL, "nvmlSystemGetCudaDriverVersion", (unsigned *)out); }
int nvmlDeviceGetCount_v2(unsigned *out) { return number32(NULL, "count", out); }

static int handle(int card, card_t **out)
{
    char uuid[96];
    int result = text(card, "handle", uuid, sizeof uuid);
    if (result != SUCCESS && result != NOT_SUPPORTED)
        return result;
    cards[card].number = card;
    *out = &cards[card];
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, card_t **out) { return handle((int)index, out); }
int nvmlDeviceGetUUID(card_t *c, char *out, unsigned size) { return text(c->number, "nvmlDeviceGetUUID", out, size); }
int nvmlDeviceGetName(card_t *c, char *out, unsigned size) { return text(c->number, "nvmlDeviceGetName", out, size); }

int nvmlDeviceGetPciInfo_v3(card_t *c, pci_t *out)
{
    memset(out, 0, sizeof *out);
    return text(c->number, "nvmlDeviceGetPciInfo", out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetUtilizationRates(card_t *c, unsigned out[2])
{
    const char *value;
    int result = look(c->number, "nvmlDeviceGetUtilizationRates", &value);
    return result == SUCCESS && sscanf(value, "%u %u", &out[0], &out[1]) != 2 ? NOT_SUPPORTED : result;
}

int nvmlDeviceGetMemoryInfo(card_t *c, unsigned long long out[3]) /* total, free, used */
{
    const char *value;
    int result = look(c->number, "nvmlDeviceGetMemoryInfo", &value);
    return result == SUCCESS && sscanf(value, "%llu %llu %llu", &out[0], &out[1], &out[2]) != 3 ? NOT_SUPPORTED : result;
}

int nvmlDeviceGetPowerUsage(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetPowerUsage", out); }
int nvmlDeviceGetEnforcedPowerLimit(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetEnforcedPowerLimit", out); }
int nvmlDeviceGetTotalEnergyConsumption(card_t *c, unsigned long long *out) { return number(c, "nvmlDeviceGetTotalEnergyConsumption", out); }
int nvmlDeviceGetPcieReplayCounter(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetPcieReplayCounter", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(card_t *c, unsigned long long *out) { return number(c, "nvmlDeviceGetCurrentClocksThrottleReasons", out); }
#ifndef BEFORE_535
int nvmlDeviceGetCurrentClocksEventReasons(card_t *c, unsigned long long *out) { return number(c, "nvmlDeviceGetCurrentClocksEventReasons", out); }
#endif

static int narrow(card_t *c, const char *call, unsigned argument, unsigned *out)
{
    unsigned long long wide;
    int result = numbered(c, call, argument, &wide);
    if (result == SUCCESS)
        *out = (unsigned)wide;
    return result;
}

int nvmlDeviceGetTemperature(card_t *c, unsigned sensor, unsigned *out) { return narrow(c, "nvmlDeviceGetTemperature", sensor, out); }
int nvmlDeviceGetClockInfo(card_t *c, unsigned kind, unsigned *out) { return narrow(c, "nvmlDeviceGetClockInfo", kind, out); }
int nvmlDeviceGetNvLinkState(card_t *c, unsigned link, unsigned *out) { return narrow(c, "nvmlDeviceGetNvLinkState", link, out); }
int nvmlDeviceGetPcieThroughput(card_t *c, unsigned way, unsigned *out) { return narrow(c, "nvmlDeviceGetPcieThroughput", way, out); }

int nvmlDeviceGetTotalEccErrors(card_t *c, unsigned kind, unsigned counter, unsigned long long *out)
{
    return counter != 0 ? NOT_SUPPORTED : numbered(c, "nvmlDeviceGetTotalEccErrors", kind, out);
}

int nvmlDeviceGetFieldValues(card_t *c, int count, field_t *fields)
{
    const char *value;
    int result = look(c->number, "nvmlDeviceGetFieldValues", &value);
    if (result != SUCCESS)
        return result;
    for (field_t *at = fields; at < fields + count; at++) {
        char key[64];
        unsigned type = 3;
        snprintf(key, sizeof key, "%d.field.%u.%u", c->number, at->field, at->scope);
        value = find(key);
        if (value == NULL && (at->scope == 0 || at->scope == ~0u)) {
            snprintf(key, sizeof key, "%d.field.%u", c->number, at->field);
            value = find(key);
        }
        at->result = value == NULL ? NOT_SUPPORTED : *value == '!' ? (unsigned)atoi(value + 1) : SUCCESS;
        if (at->result == SUCCESS) {
            snprintf(key, sizeof key, "%.*s", (int)strcspn(value, "\n"), value);
            sscanf(key, "%llu %u", &at->value, &type);
            at->type = type;
        }
    }
    return SUCCESS;
}

/* -- MIG ------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(card_t *c, unsigned *current, unsigned *pending)
{
    int result = number32(c, "nvmlDeviceGetMigMode", current);
    *pending = *current;
    return result;
}

int nvmlDeviceGetMaxMigDeviceCount(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetMaxMigDeviceCount", out); }

int nvmlDeviceGetMigDeviceHandleByIndex(card_t *c, unsigned index, card_t **out)
{
    char key[64];
    int result = begin("nvmlDeviceGetMigDeviceHandleByIndex"), card = 100 * (c->number + 1) + (int)index;
    snprintf(key, sizeof key, "%d.nvmlDeviceGetUUID", card);
    if (result == SUCCESS)
        result = find(key) == NULL ? NOT_FOUND : handle(card, out);
    return result;
}

int nvmlDeviceGetGpuInstanceId(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetGpuInstanceId", out); }
int nvmlDeviceGetComputeInstanceId(card_t *c, unsigned *out) { return number32(c, "nvmlDeviceGetComputeInstanceId", out); }

/* -- events ---------------------------------------------------------------------------------- */

int nvmlEventSetCreate(void **out)
{
    const char *value = NULL;
    int result = look(-1, "nvmlEventSetCreate", &value);
    *out = cards;
    return result;
}

int nvmlDeviceRegisterEvents(card_t *c, unsigned long long types, void *set)
{
    const char *value = NULL;
    (void)set;
    return types == 8 ? look(c->number, "nvmlDeviceRegisterEvents", &value) : NOT_SUPPORTED;
}

int nvmlEventSetWait_v2(void *set, event_t *out, unsigned timeout_ms)
{
    char key[32];
    int card, result = begin("nvmlEventSetWait");
    unsigned long long xid;
    (void)set;
    snprintf(key, sizeof key, "event %ld", delivered + 1);
    const char *value = result == SUCCESS ? find(key) : NULL;
    if (value == NULL || sscanf(value, "%d %llu", &card, &xid) != 2)
        return result != SUCCESS ? result : timeout_ms == 0 ? TIMEOUT : NOT_SUPPORTED;
    delivered++;
    memset(out, 0, sizeof *out);
    out->card = &cards[card];
    out->type = 8;
    out->data = xid;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
