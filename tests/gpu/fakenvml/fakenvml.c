/* A small libnvidia-ml.so.1 that answers from a scene file; it knows no GPU and nothing of the program that loads it.
 *
 * The scene's path is in K2TUI_FAKE_NVML; the file is read again when it changes. Without a scene the library behaves as one
 * whose driver is not loaded. The scene's grammar (one statement a line, '#' opens a comment):
 *
 *   driver TEXT              driver version            cuda N             CUDA driver version (13000 = 13.0)
 *   init CODE                what nvmlInit returns     delay_ms N         every call takes that long
 *   gpus N                   how many GPUs             wave 1             utilisation, power, temperature move with the second
 *   gpu SEL KEY VALUE        SEL: '*', '3' or '0-3'; KEY of TEXTS or NUMBERS below; -1 = Not Supported
 *   gpu SEL fail FN CODE     FN: a getter's name without "nvmlDeviceGet", or '*'; CODE: the NVML error
 *   gpu SEL delay FN MS      the getter takes that long
 *   gpu SEL burn FN US       the getter keeps the CPU busy for that long, as real drivers do
 *   gpu SEL gone 1           the next nvmlInit does not count it; every call before that says GPU_IS_LOST
 *   gpu SEL proc PID BYTES C|G SM MEM [GI CI]   BYTES -1 = not available
 *   gpu SEL mig GI CI TOTAL USED RESERVED SMS SLICES NAME...
 *   frame T GPU UTIL MEMUTIL USED POWER TEMP SM REASONS   played in a loop, T in ms from the first read of the scene
 *   link A B LEVEL P2P       topology level (10 PIX .. 50 SYS) and P2P status of a pair ('*' = every pair)
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { OK = 0, UNINIT = 1, BADARG = 2, NOTSUP = 3, NOTFOUND = 6, SMALL = 7, NODRIVER = 9, LOST = 15, TIMEOUT = 10, VERSION = 25 };
#define MAXG 16
#define MAXP 32
#define MAXM 8
#define MAXF 4096

#define NUMBERS(X) \
  X(total) X(used) X(reserved) X(util) X(memutil) X(power) X(limit) X(limit_default) X(limit_max) X(limit_min) X(temp) \
  X(memtemp) X(sm) X(sm_max) X(mem) X(mem_max) X(reasons) X(gen) X(gen_max) X(width) X(width_max) X(pcie_tx) X(pcie_rx) \
  X(fan) X(fans) X(energy) X(ecc) X(ecc_corr) X(ecc_unc) X(ecc_corr_total) X(ecc_unc_total) X(remap_corr) X(remap_unc) \
  X(remap_pending) X(remap_failed) X(temp_shutdown) X(temp_slow) X(temp_memmax) X(temp_max) X(pstate) X(persistence) \
  X(virt) X(mig_mode) X(arch) X(major) X(minor) X(links) X(nvlink_tx) X(nvlink_rx) X(numa) X(c2c) X(addressing) X(xid) \
  X(xid_seq) X(encoder) X(decoder) X(compute_mode) X(bar1_total) X(bar1_used) X(retired_sbe) X(retired_dbe) X(pcie_count_tx) \
  X(pcie_count_rx) X(replay) X(gone) X(cores) X(buswidth) X(numa_node) X(remote) X(fabric)
#define TEXTS(X) X(name) X(uuid) X(serial) X(vbios)
#define GETTERS(X) \
  X(HandleByIndex) X(Name) X(UUID) X(Serial) X(VbiosVersion) X(PciInfo) X(MemoryInfo) X(MemoryInfo_v2) X(UtilizationRates) \
  X(PowerUsage) X(EnforcedPowerLimit) X(PowerManagementLimit) X(PowerManagementDefaultLimit) \
  X(PowerManagementLimitConstraints) X(Temperature) X(TemperatureThreshold) X(ClockInfo) X(MaxClockInfo) \
  X(CurrentClocksEventReasons) X(CurrPcieLinkGeneration) X(MaxPcieLinkGeneration) X(CurrPcieLinkWidth) \
  X(MaxPcieLinkWidth) X(PcieThroughput) X(PcieReplayCounter) X(FanSpeed) X(NumFans) X(TotalEnergyConsumption) X(EccMode) \
  X(TotalEccErrors) X(RemappedRows) X(RetiredPages) X(PerformanceState) X(PersistenceMode) X(VirtualizationMode) \
  X(MigMode) X(MaxMigDeviceCount) X(MigDeviceHandleByIndex) X(Attributes) X(Architecture) X(CudaComputeCapability) \
  X(NvLinkState) X(FieldValues) X(NumaNodeId) X(AddressingMode) X(C2cModeInfoV) X(ComputeRunningProcesses) \
  X(GraphicsRunningProcesses) X(MPSComputeRunningProcesses) X(ProcessUtilization) X(EncoderUtilization) \
  X(DecoderUtilization) X(ComputeMode) X(BAR1MemoryInfo) X(DisplayMode) X(DisplayActive) X(Index) X(MinorNumber) \
  X(GpuInstanceId) X(ComputeInstanceId) X(TopologyCommonAncestor) X(P2PStatus) X(CpuAffinity) X(Events) X(NumGpuCores) \
  X(MemoryBusWidth)

enum {
#define X(n) K_##n,
  NUMBERS(X)
#undef X
  NK };
enum {
#define X(n) F_##n,
  GETTERS(X)
#undef X
  NF };
static const char *num_names[] = {
#define X(n) #n,
  NUMBERS(X)
#undef X
};
static const char *fn_names[] = {
#define X(n) #n,
  GETTERS(X)
#undef X
};

struct proc { unsigned pid, sm, mem, gi, ci; long long bytes; char type; };
struct mig { unsigned gi, ci, sms, slices; long long total, used, reserved; char name[96]; };
struct gpu {
  long long v[NK];
  int fail[NF], delay[NF], burn[NF];
  char name[96], uuid[96], serial[32], vbios[32];
  struct proc procs[MAXP];
  int nprocs;
  struct mig migs[MAXM];
  int nmigs;
};
struct frame { long long ms; int gpu; long long util, memutil, used, power, temp, sm, reasons; };
struct scene {
  char driver[80];
  long long cuda, init, delay_ms, wave;
  int ngpus;
  struct gpu g[MAXG];
  struct frame frames[MAXF];
  int nframes;
  long long frame_span;
  signed char level[MAXG][MAXG], p2p[MAXG][MAXG];
};
struct dev { int gpu, mig; }; /* mig -1 = the whole GPU */

static struct scene S;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct timespec seen_mtime;
static long long seen_ino = -1, last_look_ms = -1, start_ms;
static int have_scene, refs, order[MAXG], nvisible;
static long long xid_done[MAXG];
static struct dev devs[MAXG], migdevs[MAXG][MAXM];

static long long now_ms(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void selected(const char *sel, int *a, int *b) {
  if (*sel == '*') { *a = 0; *b = MAXG - 1; return; }
  *a = *b = atoi(sel);
  const char *dash = strchr(sel, '-');
  if (dash) *b = atoi(dash + 1);
  if (*a < 0) *a = 0;
  if (*b > MAXG - 1) *b = MAXG - 1;
}

static int index_of(const char **names, int n, const char *word) {
  for (int i = 0; i < n; i++) if (!strcmp(names[i], word)) return i;
  return -1;
}

static void parse(FILE *fh) {
  static struct scene n; /* too big for some stacks */
  memset(&n, 0, sizeof n);
  strcpy(n.driver, "580.159.04");
  n.cuda = 13000;
  memset(n.level, 40, sizeof n.level);
  for (int g = 0; g < MAXG; g++) {
    for (int k = 0; k < NK; k++) n.g[g].v[k] = -1;
    n.g[g].v[K_gone] = 0;
    n.g[g].v[K_xid_seq] = 0;
    snprintf(n.g[g].uuid, sizeof n.g[g].uuid, "GPU-%08d-0000-0000-0000-%012d", g, g);
    strcpy(n.g[g].name, "NVIDIA H200");
  }
  char line[512], a[64], b[64], c[64];
  while (fgets(line, sizeof line, fh)) {
    char *hash = strchr(line, '#');
    if (hash) *hash = 0;
    line[strcspn(line, "\r\n")] = 0;
    int at = 0;
    long long x = 0;
    if (sscanf(line, "driver %79s", n.driver) == 1) continue;
    if (sscanf(line, "cuda %lld", &n.cuda) == 1) continue;
    if (sscanf(line, "init %lld", &n.init) == 1) continue;
    if (sscanf(line, "delay_ms %lld", &n.delay_ms) == 1) continue;
    if (sscanf(line, "wave %lld", &n.wave) == 1) continue;
    if (sscanf(line, "gpus %lld", &x) == 1) { n.ngpus = x < 0 ? 0 : x > MAXG ? MAXG : (int)x; continue; }
    struct frame f;
    if (sscanf(line, "frame %lld %d %lld %lld %lld %lld %lld %lld %lld", &f.ms, &f.gpu, &f.util, &f.memutil, &f.used,
               &f.power, &f.temp, &f.sm, &f.reasons) == 9) {
      if (n.nframes < MAXF) n.frames[n.nframes++] = f;
      if (f.ms + 250 > n.frame_span) n.frame_span = f.ms + 250;
      continue;
    }
    int level, p2p, a0, a1, b0, b1;
    if (sscanf(line, "link %63s %63s %d %d", a, b, &level, &p2p) == 4) {
      selected(a, &a0, &a1);
      selected(b, &b0, &b1);
      for (int i = a0; i <= a1; i++) for (int j = b0; j <= b1; j++)
        n.level[i][j] = n.level[j][i] = (signed char)level, n.p2p[i][j] = n.p2p[j][i] = (signed char)p2p;
      continue;
    }
    if (sscanf(line, "gpu %63s %63s %n", a, b, &at) < 2 || !at) continue;
    const char *rest = line + at;
    int lo, hi;
    selected(a, &lo, &hi);
    for (int g = lo; g <= hi; g++) {
      struct gpu *q = &n.g[g];
      int code, key;
      struct proc p = {.gi = 0xFFFFFFFFu, .ci = 0xFFFFFFFFu};
      struct mig m;
      memset(&m, 0, sizeof m);
      if (!strcmp(b, "name")) snprintf(q->name, sizeof q->name, "%s", rest);
      else if (!strcmp(b, "uuid")) snprintf(q->uuid, sizeof q->uuid, "%s", rest);
      else if (!strcmp(b, "serial")) snprintf(q->serial, sizeof q->serial, "%s", rest);
      else if (!strcmp(b, "vbios")) snprintf(q->vbios, sizeof q->vbios, "%s", rest);
      else if (!strcmp(b, "fail") || !strcmp(b, "delay") || !strcmp(b, "burn")) {
        if (sscanf(rest, "%63s %d", c, &code) != 2) continue;
        int *table = *b == 'f' ? q->fail : *b == 'd' ? q->delay : q->burn;
        for (int f0 = 0; f0 < NF; f0++) if (*c == '*' || !strcmp(c, fn_names[f0])) table[f0] = code;
      } else if (!strcmp(b, "proc")) {
        if (sscanf(rest, "%u %lld %c %u %u %u %u", &p.pid, &p.bytes, &p.type, &p.sm, &p.mem, &p.gi, &p.ci) >= 5 && q->nprocs < MAXP)
          q->procs[q->nprocs++] = p;
      } else if (!strcmp(b, "mig")) {
        int used_chars = 0;
        if (sscanf(rest, "%u %u %lld %lld %lld %u %u %n", &m.gi, &m.ci, &m.total, &m.used, &m.reserved, &m.sms, &m.slices,
                   &used_chars) >= 7 && q->nmigs < MAXM) {
          snprintf(m.name, sizeof m.name, "%s", rest + used_chars);
          q->migs[q->nmigs++] = m;
        }
      } else if ((key = index_of(num_names, NK, b)) >= 0) q->v[key] = atoll(rest);
    }
  }
  S = n;
}

static void look(void) { /* with the lock held: read the scene again when it changed, asked at most every 20 ms */
  long long t = now_ms(CLOCK_MONOTONIC);
  if (last_look_ms >= 0 && t - last_look_ms < 20) return;
  last_look_ms = t;
  const char *path = getenv("K2TUI_FAKE_NVML");
  struct stat st;
  if (!path || stat(path, &st)) { have_scene = 0; seen_ino = -1; return; }
  if (seen_ino == (long long)st.st_ino && seen_mtime.tv_sec == st.st_mtim.tv_sec && seen_mtime.tv_nsec == st.st_mtim.tv_nsec) return;
  FILE *fh = fopen(path, "r");
  if (!fh) { have_scene = 0; return; }
  parse(fh);
  fclose(fh);
  seen_ino = (long long)st.st_ino;
  seen_mtime = st.st_mtim;
  have_scene = 1;
  start_ms = t;
}

static void nap(long long ms) {
  if (ms <= 0) return;
  struct timespec t = {ms / 1000, (ms % 1000) * 1000000};
  nanosleep(&t, NULL);
}

static void burn(long long us) {
  if (us <= 0) return;
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  long long end = t.tv_sec * 1000000000LL + t.tv_nsec + us * 1000;
  do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  while (t.tv_sec * 1000000000LL + t.tv_nsec < end);
}

/* Common head of a getter: the device of a handle, its delay, its failure. Copies out, so that no lock is held while waiting. */
static int enter(void *handle, int fn, struct gpu **g, struct dev **d) {
  if (!handle) return BADARG;
  pthread_mutex_lock(&lock);
  look();
  struct dev *dev = handle;
  struct gpu *gpu = &S.g[dev->gpu];
  int code = !refs ? UNINIT : gpu->v[K_gone] > 0 ? LOST : gpu->fail[fn];
  long long wait = S.delay_ms + gpu->delay[fn], work = gpu->burn[fn];
  pthread_mutex_unlock(&lock);
  nap(wait);
  burn(work);
  *g = gpu;
  if (d) *d = dev;
  return code;
}
#define ENTER(fn) struct gpu *g; struct dev *d; int err = enter(h, F_##fn, &g, &d); if (err) return err; (void)d;

static long long value(struct gpu *g, int key) {
  long long v = g->v[key];
  int i = (int)(g - S.g);
  if (S.nframes && S.frame_span > 0) {
    long long at = (now_ms(CLOCK_MONOTONIC) - start_ms) % S.frame_span;
    const struct frame *best = NULL;
    for (int f = 0; f < S.nframes; f++) if (S.frames[f].gpu == i && S.frames[f].ms <= at) best = &S.frames[f];
    if (best) switch (key) {
      case K_util: return best->util;
      case K_memutil: return best->memutil;
      case K_used: return best->used;
      case K_power: return best->power;
      case K_temp: return best->temp;
      case K_sm: return best->sm;
      case K_reasons: return best->reasons;
      default: break;
    }
  }
  if (S.wave && v >= 0) {
    double s = sin(6.283185307 * ((double)(now_ms(CLOCK_REALTIME) / 1000) / 23.0 + i / 8.0));
    switch (key) {
      case K_util: v += (long long)(s * 12); return v < 0 ? 0 : v > 100 ? 100 : v;
      case K_memutil: v += (long long)(s * 8); return v < 0 ? 0 : v > 100 ? 100 : v;
      case K_power: return v + (long long)(s * 60000);
      case K_temp: return v + (long long)(s * 4);
      case K_nvlink_tx: case K_nvlink_rx: case K_pcie_count_tx: case K_pcie_count_rx: case K_energy:
        return v + (now_ms(CLOCK_REALTIME) % 1000000000) * (key == K_energy ? 500 : 200000);
      default: break;
    }
  }
  return v;
}
#define GIVE(type, key) do { long long got = value(g, key); if (got < 0) return NOTSUP; *out = (type)got; return OK; } while (0)
#define SIMPLE(fn, type, key) int nvmlDeviceGet##fn(void *h, type *out) { ENTER(fn) GIVE(type, key); }
#define NOMIG if (d->mig >= 0) return NOTSUP;

static int start(void) {
  pthread_mutex_lock(&lock);
  last_look_ms = -1;
  look();
  int code = !have_scene ? NODRIVER : (int)S.init;
  long long wait = have_scene ? S.delay_ms : 0;
  if (!code) {
    if (!refs) {
      nvisible = 0;
      for (int i = 0; i < MAXG; i++) xid_done[i] = S.g[i].v[K_xid_seq]; /* only what happens from now on is an event */
      for (int i = 0; i < S.ngpus; i++) if (S.g[i].v[K_gone] <= 0) order[nvisible++] = i;
    }
    refs++;
    for (int i = 0; i < MAXG; i++) {
      devs[i] = (struct dev){i, -1};
      for (int m = 0; m < MAXM; m++) migdevs[i][m] = (struct dev){i, m};
    }
  }
  pthread_mutex_unlock(&lock);
  nap(wait);
  return code;
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return start(); }
int nvmlInit_v2(void) { return start(); }
int nvmlShutdown(void) {
  pthread_mutex_lock(&lock);
  int code = refs > 0 ? OK : UNINIT;
  if (refs > 0) refs--;
  pthread_mutex_unlock(&lock);
  return code;
}
const char *nvmlErrorString(int code) { (void)code; return "fake NVML error"; }

static int text(char *out, unsigned size, const char *what) {
  if (strlen(what) + 1 > size) return SMALL;
  strcpy(out, what);
  return OK;
}
static int system_call(void) {
  pthread_mutex_lock(&lock);
  look();
  int code = refs ? OK : UNINIT;
  long long wait = S.delay_ms;
  pthread_mutex_unlock(&lock);
  nap(wait);
  return code;
}
int nvmlSystemGetDriverVersion(char *out, unsigned n) { int e = system_call(); return e ? e : text(out, n, S.driver); }
int nvmlSystemGetNVMLVersion(char *out, unsigned n) { int e = system_call(); return e ? e : text(out, n, "13.580.159.04"); }
int nvmlSystemGetCudaDriverVersion(int *out) { int e = system_call(); *out = (int)S.cuda; return e; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }
int nvmlDeviceGetCount_v2(unsigned *out) { int e = system_call(); *out = (unsigned)nvisible; return e; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
  if (i >= (unsigned)nvisible) return BADARG;
  struct gpu *g;
  int err = enter(&devs[order[i]], F_HandleByIndex, &g, NULL);
  *out = &devs[order[i]];
  return err;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  if (!refs) return UNINIT;
  for (int i = 0; i < nvisible; i++) {
    struct gpu *g = &S.g[order[i]];
    if (!strcmp(uuid, g->uuid)) { *out = &devs[order[i]]; return OK; }
    for (int m = 0; m < g->nmigs; m++) {
      char id[128];
      snprintf(id, sizeof id, "MIG-%s-%u", g->uuid, g->migs[m].gi);
      if (!strcmp(uuid, id)) { *out = &migdevs[order[i]][m]; return OK; }
    }
  }
  return NOTFOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
  if (!refs) return UNINIT;
  for (int i = 0; i < nvisible; i++) {
    char id[32];
    snprintf(id, sizeof id, "%08X:%02X:00.0", 0, order[i] + 0x10);
    if (!strcasecmp(bus, id)) { *out = &devs[order[i]]; return OK; }
  }
  return NOTFOUND;
}

int nvmlDeviceGetName(void *h, char *out, unsigned n) {
  ENTER(Name)
  if (d->mig < 0) return text(out, n, g->name);
  char full[200];
  snprintf(full, sizeof full, "%s MIG %s", g->name, g->migs[d->mig].name);
  return text(out, n, full);
}
int nvmlDeviceGetUUID(void *h, char *out, unsigned n) {
  ENTER(UUID)
  if (d->mig < 0) return text(out, n, g->uuid);
  char id[128];
  snprintf(id, sizeof id, "MIG-%s-%u", g->uuid, g->migs[d->mig].gi);
  return text(out, n, id);
}
int nvmlDeviceGetSerial(void *h, char *out, unsigned n) { ENTER(Serial) return *g->serial ? text(out, n, g->serial) : NOTSUP; }
int nvmlDeviceGetVbiosVersion(void *h, char *out, unsigned n) { ENTER(VbiosVersion) return *g->vbios ? text(out, n, g->vbios) : NOTSUP; }
int nvmlDeviceGetIndex(void *h, unsigned *out) {
  ENTER(Index)
  if (d->mig >= 0) { *out = (unsigned)d->mig; return OK; }
  for (int i = 0; i < nvisible; i++) if (order[i] == d->gpu) *out = (unsigned)i;
  return OK;
}
int nvmlDeviceGetMinorNumber(void *h, unsigned *out) { ENTER(MinorNumber) *out = (unsigned)d->gpu; return OK; }

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *h, struct pci *out) {
  ENTER(PciInfo)
  memset(out, 0, sizeof *out);
  out->bus = (unsigned)d->gpu + 0x10;
  out->id = 590680286;
  snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:00.0", 0, out->bus);
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:00.0", 0, out->bus);
  return OK;
}

struct mem1 { unsigned long long total, free, used; };
struct mem2 { unsigned version; unsigned long long total, reserved, free, used; };
static int memory(struct gpu *g, struct dev *d, long long *total, long long *reserved, long long *used) {
  if (d->mig >= 0) {
    struct mig *m = &g->migs[d->mig];
    *total = m->total; *reserved = m->reserved; *used = m->used;
    return OK;
  }
  *total = value(g, K_total); *used = value(g, K_used); *reserved = value(g, K_reserved);
  if (*reserved < 0) *reserved = 0;
  return *total < 0 || *used < 0 ? NOTSUP : OK;
}
int nvmlDeviceGetMemoryInfo(void *h, struct mem1 *out) {
  ENTER(MemoryInfo)
  long long total, reserved, used;
  if ((err = memory(g, d, &total, &reserved, &used))) return err;
  *out = (struct mem1){total, total - used - reserved, used + reserved}; /* the old call counts reserved as used */
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, struct mem2 *out) {
  ENTER(MemoryInfo_v2)
  if (out->version != 0x02000028) return VERSION;
  long long total, reserved, used;
  if ((err = memory(g, d, &total, &reserved, &used))) return err;
  out->total = total; out->reserved = reserved; out->used = used; out->free = total - used - reserved;
  return OK;
}
int nvmlDeviceGetBAR1MemoryInfo(void *h, struct mem1 *out) {
  ENTER(BAR1MemoryInfo) NOMIG
  long long total = value(g, K_bar1_total), used = value(g, K_bar1_used);
  if (total < 0 || used < 0) return NOTSUP;
  *out = (struct mem1){total, total - used, used};
  return OK;
}

int nvmlDeviceGetUtilizationRates(void *h, unsigned *out) {
  ENTER(UtilizationRates) NOMIG
  long long util = value(g, K_util), mem = value(g, K_memutil);
  if (util < 0 || value(g, K_mig_mode) == 1) return NOTSUP;
  out[0] = (unsigned)util;
  out[1] = mem < 0 ? 0 : (unsigned)mem;
  return OK;
}
SIMPLE(PowerUsage, unsigned, K_power)
SIMPLE(EnforcedPowerLimit, unsigned, K_limit)
SIMPLE(PowerManagementLimit, unsigned, K_limit)
SIMPLE(PowerManagementDefaultLimit, unsigned, K_limit_default)
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *lo, unsigned *hi) {
  ENTER(PowerManagementLimitConstraints)
  if (value(g, K_limit_max) < 0) return NOTSUP;
  *lo = (unsigned)value(g, K_limit_min);
  *hi = (unsigned)value(g, K_limit_max);
  return OK;
}
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *out) { (void)sensor; ENTER(Temperature) GIVE(unsigned, K_temp); }
struct temp1 { unsigned version; int sensor, celsius; };
int nvmlDeviceGetTemperatureV(void *h, struct temp1 *t) {
  int *out = &t->celsius;
  ENTER(Temperature)
  GIVE(int, K_temp);
}
int nvmlDeviceGetTemperatureThreshold(void *h, int which, unsigned *out) {
  ENTER(TemperatureThreshold)
  static const int keys[] = {K_temp_shutdown, K_temp_slow, K_temp_memmax, K_temp_max};
  if (which < 0 || which > 3) return NOTSUP;
  GIVE(unsigned, keys[which]);
}
int nvmlDeviceGetClockInfo(void *h, int which, unsigned *out) { ENTER(ClockInfo) GIVE(unsigned, which == 2 ? K_mem : K_sm); }
int nvmlDeviceGetMaxClockInfo(void *h, int which, unsigned *out) { ENTER(MaxClockInfo) GIVE(unsigned, which == 2 ? K_mem_max : K_sm_max); }
SIMPLE(CurrentClocksEventReasons, unsigned long long, K_reasons)
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *out) { return nvmlDeviceGetCurrentClocksEventReasons(h, out); }
SIMPLE(CurrPcieLinkGeneration, unsigned, K_gen)
SIMPLE(MaxPcieLinkGeneration, unsigned, K_gen_max)
SIMPLE(CurrPcieLinkWidth, unsigned, K_width)
SIMPLE(MaxPcieLinkWidth, unsigned, K_width_max)
int nvmlDeviceGetPcieThroughput(void *h, int which, unsigned *out) { ENTER(PcieThroughput) nap(20); GIVE(unsigned, which == 0 ? K_pcie_tx : K_pcie_rx); }
SIMPLE(PcieReplayCounter, unsigned, K_replay)
SIMPLE(FanSpeed, unsigned, K_fan)
SIMPLE(NumFans, unsigned, K_fans)
SIMPLE(TotalEnergyConsumption, unsigned long long, K_energy)
int nvmlDeviceGetEccMode(void *h, int *now, int *pending) {
  ENTER(EccMode)
  if (value(g, K_ecc) < 0) return NOTSUP;
  *now = *pending = (int)value(g, K_ecc);
  return OK;
}
int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *out) {
  ENTER(TotalEccErrors)
  GIVE(unsigned long long, type == 0 ? (counter == 0 ? K_ecc_corr : K_ecc_corr_total) : (counter == 0 ? K_ecc_unc : K_ecc_unc_total));
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failed) {
  ENTER(RemappedRows)
  if (value(g, K_remap_corr) < 0) return NOTSUP;
  *corr = (unsigned)value(g, K_remap_corr);
  *unc = (unsigned)value(g, K_remap_unc);
  *pending = (unsigned)value(g, K_remap_pending);
  *failed = (unsigned)value(g, K_remap_failed);
  return OK;
}
int nvmlDeviceGetRetiredPages(void *h, int cause, unsigned *count, unsigned long long *pages) {
  ENTER(RetiredPages)
  long long n = value(g, cause == 0 ? K_retired_sbe : K_retired_dbe);
  if (n < 0) return NOTSUP;
  unsigned room = *count;
  *count = (unsigned)n;
  if (!pages || room < (unsigned)n) return n ? SMALL : OK;
  for (unsigned i = 0; i < (unsigned)n; i++) pages[i] = i * 4096;
  return OK;
}
SIMPLE(PerformanceState, int, K_pstate)
SIMPLE(PersistenceMode, int, K_persistence)
SIMPLE(VirtualizationMode, int, K_virt)
SIMPLE(Architecture, unsigned, K_arch)
SIMPLE(ComputeMode, int, K_compute_mode)
SIMPLE(NumGpuCores, unsigned, K_cores)
SIMPLE(MemoryBusWidth, unsigned, K_buswidth)
SIMPLE(NumaNodeId, int, K_numa)
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  ENTER(CudaComputeCapability)
  if (value(g, K_major) < 0) return NOTSUP;
  *major = (int)value(g, K_major);
  *minor = (int)value(g, K_minor);
  return OK;
}
struct versioned { unsigned version, value; };
int nvmlDeviceGetAddressingMode(void *h, struct versioned *v) { unsigned *out = &v->value; ENTER(AddressingMode) GIVE(unsigned, K_addressing); }
int nvmlDeviceGetC2cModeInfoV(void *h, unsigned *out) { ENTER(C2cModeInfoV) GIVE(unsigned, K_c2c); }
int nvmlDeviceGetEncoderUtilization(void *h, unsigned *out, unsigned *period) { ENTER(EncoderUtilization) *period = 100000; GIVE(unsigned, K_encoder); }
int nvmlDeviceGetDecoderUtilization(void *h, unsigned *out, unsigned *period) { ENTER(DecoderUtilization) *period = 100000; GIVE(unsigned, K_decoder); }
int nvmlDeviceGetDisplayMode(void *h, int *out) { ENTER(DisplayMode) *out = 0; return OK; }
int nvmlDeviceGetDisplayActive(void *h, int *out) { ENTER(DisplayActive) *out = 0; return OK; }

int nvmlDeviceGetDriverModel(void *h, int *now, int *pending) { (void)h; (void)now; (void)pending; return NOTSUP; } /* Windows only */
int nvmlDeviceGetDriverModel_v2(void *h, int *now, int *pending) { return nvmlDeviceGetDriverModel(h, now, pending); }
int nvmlDeviceGetConfComputeMemSizeInfo(void *h, void *out) { (void)h; (void)out; return NOTSUP; }
int nvmlDeviceGetRunningProcessDetailList(void *h, void *out) { (void)h; (void)out; return NOTSUP; }

int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *pending) {
  ENTER(MigMode) NOMIG
  if (value(g, K_mig_mode) < 0) return NOTSUP;
  *now = *pending = (unsigned)value(g, K_mig_mode);
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { ENTER(MaxMigDeviceCount) *out = value(g, K_mig_mode) == 1 ? MAXM - 1 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **out) {
  ENTER(MigDeviceHandleByIndex)
  if (i >= (unsigned)g->nmigs) return NOTFOUND;
  *out = &migdevs[d->gpu][i];
  return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) { *out = &devs[((struct dev *)h)->gpu]; return OK; }
int nvmlDeviceIsMigDeviceHandle(void *h, unsigned *out) { *out = ((struct dev *)h)->mig >= 0; return OK; }
int nvmlDeviceGetGpuInstanceId(void *h, unsigned *out) { ENTER(GpuInstanceId) if (d->mig < 0) return BADARG; *out = g->migs[d->mig].gi; return OK; }
int nvmlDeviceGetComputeInstanceId(void *h, unsigned *out) { ENTER(ComputeInstanceId) if (d->mig < 0) return BADARG; *out = g->migs[d->mig].ci; return OK; }
struct attributes { unsigned sms, copy, dec, enc, jpeg, ofa, gi_slices, ci_slices; unsigned long long mb; };
int nvmlDeviceGetAttributes_v2(void *h, struct attributes *out) {
  ENTER(Attributes)
  if (d->mig < 0) return NOTSUP;
  struct mig *m = &g->migs[d->mig];
  memset(out, 0, sizeof *out);
  out->sms = m->sms;
  out->gi_slices = out->ci_slices = m->slices;
  out->mb = (unsigned long long)m->total >> 20;
  return OK;
}

struct pinfo { unsigned pid; unsigned long long bytes; unsigned gi, ci; };
static int processes(struct gpu *g, struct dev *d, char type, unsigned *count, struct pinfo *out) {
  unsigned n = 0, room = *count;
  struct pinfo found[MAXP];
  for (int i = 0; i < g->nprocs; i++) {
    struct proc *p = &g->procs[i];
    if (p->type != type || (d->mig >= 0 && p->gi != g->migs[d->mig].gi)) continue;
    found[n++] = (struct pinfo){p->pid, p->bytes < 0 ? 0xFFFFFFFFFFFFFFFFull : (unsigned long long)p->bytes, p->gi, p->ci};
  }
  *count = n;
  if (!n) return OK;
  if (!out || room < n) return SMALL;
  memcpy(out, found, n * sizeof *out);
  return OK;
}
#define PROCS(fn, type) \
  int nvmlDeviceGet##fn##_v3(void *h, unsigned *count, struct pinfo *out) { ENTER(fn) return processes(g, d, type, count, out); } \
  int nvmlDeviceGet##fn##_v2(void *h, unsigned *count, struct pinfo *out) { ENTER(fn) return processes(g, d, type, count, out); }
PROCS(ComputeRunningProcesses, 'C')
PROCS(GraphicsRunningProcesses, 'G')
PROCS(MPSComputeRunningProcesses, 'M')

struct usage { unsigned pid; unsigned long long stamp; unsigned sm, mem, enc, dec; };
int nvmlDeviceGetProcessUtilization(void *h, struct usage *out, unsigned *count, unsigned long long since) {
  (void)since;
  ENTER(ProcessUtilization) NOMIG
  if (value(g, K_mig_mode) == 1) return NOTSUP;
  unsigned n = (unsigned)g->nprocs, room = *count;
  *count = n;
  if (!n) return NOTFOUND;
  if (!out || room < n) return SMALL;
  for (unsigned i = 0; i < n; i++)
    out[i] = (struct usage){g->procs[i].pid, (unsigned long long)now_ms(CLOCK_REALTIME) * 1000, g->procs[i].sm, g->procs[i].mem, 0, 0};
  return OK;
}

int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *out) {
  ENTER(NvLinkState) NOMIG
  if (g->v[K_links] < 0) return NOTSUP;
  if (link >= (unsigned)g->v[K_links]) return BADARG;
  *out = 1;
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, unsigned *out) { (void)link; ENTER(NvLinkState) GIVE(unsigned, K_remote); }
/* Direct links: two a peer, in turn, to every other GPU. */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, struct pci *out) {
  ENTER(NvLinkState)
  if (g->v[K_remote] != 0) return NOTSUP;
  int peers = nvisible - 1;
  if (peers < 1) return NOTSUP;
  int at = (int)(link / 2) % peers, seen = 0;
  for (int i = 0; i < nvisible; i++) {
    if (order[i] == d->gpu) continue;
    if (seen++ == at) return nvmlDeviceGetPciInfo_v3(&devs[order[i]], out);
  }
  return NOTSUP;
}
struct fabric { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfo(void *h, struct fabric *out) {
  ENTER(NvLinkState)
  if (g->v[K_fabric] < 0) return NOTSUP;
  memset(out, 0, sizeof *out);
  out->state = (unsigned char)g->v[K_fabric];
  return OK;
}
struct field { uint32_t id, scope; int64_t stamp, latency; uint32_t type; int32_t ret; union { double d; uint32_t u; uint64_t ull; int64_t sll; } v; };
int nvmlDeviceGetFieldValues(void *h, int n, struct field *f) {
  ENTER(FieldValues)
  for (int i = 0; i < n; i++) {
    int key = -1;
    f[i].type = 3; /* unsigned long long */
    switch (f[i].id) {
      case 82: key = K_memtemp; f[i].type = 1; break;
      case 83: key = K_energy; break;
      case 138: key = K_nvlink_tx; break;
      case 139: key = K_nvlink_rx; break;
      case 185: case 186: key = K_power; f[i].type = 1; break;
      case 197: key = K_pcie_count_tx; break;
      case 198: key = K_pcie_count_rx; break;
      default: break;
    }
    long long got = key < 0 || d->mig >= 0 ? -1 : value(g, key);
    f[i].stamp = now_ms(CLOCK_REALTIME) * 1000;
    f[i].ret = got < 0 ? NOTSUP : OK;
    f[i].v.ull = got < 0 ? 0 : (uint64_t)got;
  }
  return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(void *h, void *other, int *out) { ENTER(TopologyCommonAncestor) *out = S.level[d->gpu][((struct dev *)other)->gpu]; return OK; }
int nvmlDeviceGetP2PStatus(void *h, void *other, int what, int *out) {
  ENTER(P2PStatus)
  int status = S.p2p[d->gpu][((struct dev *)other)->gpu];
  *out = what == 2 ? (g->v[K_links] > 0 ? status : 5) : what == 4 ? 5 : status;
  return OK;
}
int nvmlDeviceGetCpuAffinity(void *h, unsigned n, unsigned long long *out) {
  ENTER(CpuAffinity)
  if (g->v[K_numa_node] < 0) return NOTSUP;
  for (unsigned i = 0; i < n; i++) out[i] = 0;
  for (int c = 0; c < 8; c++) {
    unsigned cpu = (unsigned)g->v[K_numa_node] * 8 + c;
    if (cpu / 64 < n) out[cpu / 64] |= 1ull << (cpu % 64);
  }
  return OK;
}

int nvmlEventSetCreate(void **out) { static int set; *out = &set; return refs ? OK : UNINIT; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) { (void)types; (void)set; ENTER(Events) return g->v[K_xid] == -2 ? NOTSUP : OK; }
struct event { void *device; unsigned long long type, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout) {
  (void)set;
  pthread_mutex_lock(&lock);
  look();
  for (int i = 0; i < S.ngpus; i++)
    if (S.g[i].v[K_xid] >= 0 && S.g[i].v[K_xid_seq] > xid_done[i]) {
      xid_done[i] = S.g[i].v[K_xid_seq];
      *out = (struct event){&devs[i], 8, (unsigned long long)S.g[i].v[K_xid], 0xFFFFFFFFu, 0xFFFFFFFFu};
      pthread_mutex_unlock(&lock);
      return OK;
    }
  pthread_mutex_unlock(&lock);
  nap(timeout);
  return TIMEOUT;
}
