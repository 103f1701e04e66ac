/* The repository's stand-in for NVML, and what NCCL and PyTorch ask besides: a played H100 with NVLink to switches.
 *
 * NCCL calls some of these without looking whether they are there, so those that are not played return an error.
 */
#include "nvml.c"

int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }
int nvmlDeviceGetHandleByIndex(unsigned index, card_t **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

static int fixed(unsigned *out, unsigned value)
{
    *out = value;
    return SUCCESS;
}

int nvmlDeviceGetIndex(card_t *c, unsigned *out) { return fixed(out, (unsigned)c->number); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, card_t **out)
{
    unsigned domain = 0, bus = 0, count = 0, of_domain, of_bus;
    sscanf(id, "%x:%x:", &domain, &bus);
    nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; i < count; i++) {
        char key[64];
        snprintf(key, sizeof key, "%u.nvmlDeviceGetPciInfo", i);
        const char *value = find(key);
        if (value != NULL && sscanf(value, "%x:%x:", &of_domain, &of_bus) == 2 && of_domain == domain && of_bus == bus)
            return nvmlDeviceGetHandleByIndex_v2(i, out);
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId(const char *id, card_t **out) { return nvmlDeviceGetHandleByPciBusId_v2(id, out); }

int nvmlDeviceGetCudaComputeCapability(card_t *c, int *major, int *minor)
{
    (void)c;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(card_t *a, card_t *b, int index, int *status)
{
    (void)a, (void)b, (void)index;
    *status = 0;
    return SUCCESS;
}

/* Eighteen links to switches. */
int nvmlDeviceGetNvLinkState(card_t *c, unsigned link, int *active)
{
    (void)c;
    *active = link < 18;
    return link < 18 ? SUCCESS : 2;
}
int nvmlDeviceGetNvLinkCapability(card_t *c, unsigned link, int capability, unsigned *result)
{
    (void)c, (void)link, (void)capability;
    return fixed(result, 1);
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(card_t *c, unsigned link, pci_t *out)
{
    (void)c;
    memset(out, 0, sizeof *out);
    out->bus = 0xc5 + link % 4;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemotePciInfo(card_t *c, unsigned link, pci_t *out) { return nvmlDeviceGetNvLinkRemotePciInfo_v2(c, link, out); }

typedef struct { unsigned version, domain, bus, device, id, subsystem, base_class, sub_class; char bus_id[32]; } pci_ext_t;
int nvmlDeviceGetPciInfoExt(card_t *c, pci_ext_t *out)
{
    pci_t pci;
    int result = nvmlDeviceGetPciInfo_v3(c, &pci);
    if (result != SUCCESS)
        return result;
    out->domain = pci.domain;
    out->bus = pci.bus;
    out->device = pci.device;
    out->id = 0x233010de; /* H100 SXM */
    out->subsystem = 0x16c110de;
    out->base_class = 3;
    out->sub_class = 2;
    memcpy(out->bus_id, pci.bus_id, sizeof out->bus_id);
    return SUCCESS;
}

int nvmlDeviceGetPcieLinkMaxSpeed(card_t *c, unsigned *out) { (void)c; return fixed(out, 32000); }
int nvmlDeviceGetCurrPcieLinkGeneration(card_t *c, unsigned *out) { (void)c; return fixed(out, 5); }
int nvmlDeviceGetCurrPcieLinkWidth(card_t *c, unsigned *out) { (void)c; return fixed(out, 16); }

int nvmlDeviceGetGpuFabricInfoV(card_t *c, void *out) { (void)c, (void)out; return NOT_SUPPORTED; }
int nvmlDeviceGetPlatformInfo(card_t *c, void *out) { (void)c, (void)out; return NOT_SUPPORTED; }
int nvmlSystemGetConfComputeState(void *out) { (void)out; return NOT_SUPPORTED; }
int nvmlSystemGetConfComputeSettings(void *out) { (void)out; return NOT_SUPPORTED; }
