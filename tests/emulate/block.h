// The runtime of a translated kernel (translate.py). It runs one block of threads after the other. Warps are fibres that are
// switched at random. Copies by cp.async and TMA are done at a random time before something waits for them. Numbers are as on a
// GPU, except for the order of sums within an MMA and the last bits of approximate functions.
//
// Vector clocks (Fidge 1988, Mattern 1989) of all threads, and of the units that copy or multiply for them, order the accesses to
// shared memory. Two accesses that conflict and are not ordered are a finding, in whatever order they happen to run. Barriers,
// mbarriers and __syncwarp order accesses. `fence.proxy.async` orders a thread's accesses before those of TMA and wgmma (PTX ISA,
// "Proxies"); cp.async counts as an access of its thread. Two writes of one instruction do not conflict, because all threads that
// hold a value store the same one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <ucontext.h>
#include <vector>

typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef int8_t s8; typedef int16_t s16; typedef int32_t s32; typedef int64_t s64;

// Numbers

template <class To, class From> static To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static float real(u32 x) { return bits<float>(x); }
static float from_f16(u16 x) { return bits<_Float16>(x); }
static u16 to_f16(float x) { return bits<u16>((_Float16)x); }
static float from_bf16(u16 x) { return real((u32)x << 16); }
static u16 to_bf16(float x) { u32 b = bits<u32>(x); return std::isnan(x) ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16; }
static u32 to_tf32(u32 x) { return (x + 0x1000) & ~0x1fffu; }  // rounds to nearest, halves away from zero
static float from_e4m3(u8 x) {
  int e = x >> 3 & 15, m = x & 7;
  float v = e == 15 && m == 7 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
  return x & 0x80 ? -v : v;
}
static u8 to_e4m3(float x) {  // rounds to nearest even and saturates
  if (std::isnan(x)) return 0x7f;
  int e;
  frexpf(fabsf(x), &e);
  e = std::max(e - 1, -6);
  float a = std::min(nearbyintf(ldexpf(fabsf(x), 3 - e)), 1e9f), v = std::min(ldexpf(a, e - 3), 448.f);
  if (v > 0) { frexpf(v, &e); e = std::max(e - 1, -6); }
  u8 code = v < ldexpf(1, -6) ? (u8)ldexpf(v, 9) : (u8)((e + 7) << 3 | (int)(ldexpf(v, 3 - e) - 8));
  return code | (std::signbit(x) ? 0x80 : 0);
}
template <class T> static T shl(T x, u32 k) { return k >= 8 * sizeof x ? 0 : x << k; }
template <class T> static T shr(T x, u32 k) { u32 most = 8 * sizeof x - 1; return k > most ? (x < 0 ? -1 : 0) : x >> k; }
template <class T> static T field(T x, u32 at, u32 n) { u32 up = 32 - n; return n ? (T)((u32)x >> at << up) >> up : 0; }
static u32 permute(u32 a, u32 b, u32 how) {
  u64 x = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 k = how >> 4 * i & 15;
    u8 byte = x >> 8 * (k & 7);
    out |= (u32)(k & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
  }
  return out;
}

// The block

const u32 SHARED = 232448, MOST_THREADS = 512, BARRIERS = 64, WARPS = 16;
const u32 COPY = MOST_THREADS, TMA = 2 * MOST_THREADS, MMA = TMA + BARRIERS, ACTORS = MMA + WARPS;  // numbered after the threads

struct Warp { int id; ucontext_t context; std::vector<char> stack, registers; bool done, waits; int barrier, line; };
struct Range { u64 low, high; };  // of global memory that the kernel may access

static u8* shared;
static const u8* parameters;
static u32 threads, block[3], blocks[3];
static size_t registers_size;
static std::vector<Warp> warps;
static Warp* warp;  // the running one
static ucontext_t scheduler;
static const Range* ranges;
static int num_ranges;
static u64 state;
static std::string findings;
static std::map<std::string, int> known;

static u32 draw(u32 n) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (state >> 11) % n; }
static int thread(int lane) { return warp->id * 32 + lane; }
static void find(const char* what, u32 at, int line) {  // reports each kind of finding once for each PTX line
  char text[300];
  snprintf(text, sizeof text, "PTX line %d: %s", line, what);
  if (known[text]++) return;
  findings += std::string(text) + " (first in block " + std::to_string(block[0]) + ", at " + std::to_string(at) + ")\n";
}
static void give_way() { swapcontext(&warp->context, &scheduler); }
static void maybe_give_way() { if (draw(128) == 0) give_way(); }

// Order

typedef std::vector<u32> Clocks;
struct Word { u32 writer, clock; int line; };  // the last write to two bytes

static std::vector<Clocks> seen, fenced;  // by thread: accesses ordered before its next one, and before TMA's
static std::vector<Word> words;
static std::vector<u32> reads;  // [words, threads + warps]: clock of the last read since the write, by thread or warp's wgmma
static std::vector<int> read_lines;

static void join(Clocks& a, const Clocks& b) { for (u32 i = 0; i < ACTORS; i++) a[i] = std::max(a[i], b[i]); }
static u32 columns() { return threads + warps.size(); }
static std::string actor(u32 a) {
  return a < COPY ? "a thread" : a < TMA ? "cp.async" : a < MMA ? "TMA" : "wgmma";
}
static void conflict(const char* kind, u32 a, const char* verb, u32 b, int earlier, u32 address, int line) {
  char text[200];
  const char* form = "%s: %s %s what %s of line %d may still use";
  snprintf(text, sizeof text, form, kind, actor(a).c_str(), verb, actor(b).c_str(), earlier);
  find(text, address, line);
}
static bool outside(u32 address, u32 n, int line) {
  if (address + n <= SHARED) return false;
  find("outside shared memory", address, line);
  return true;
}
static void check_written(u32 reader, const Clocks& before, u32 address, u32 n, int line) {
  for (u32 g = address / 2; g <= (address + n - 1) / 2; g++) {
    Word& word = words[g];
    if (word.writer != reader && word.clock > before[word.writer])
      conflict("read after write", reader, "reads", word.writer, word.line, g * 2, line);
  }
}
static void read(u32 column, u32 reader, u32 clock, const Clocks& before, u32 address, u32 n, int line) {
  if (outside(address, n, line)) return;
  check_written(reader, before, address, n, line);
  for (u32 g = address / 2; g <= (address + n - 1) / 2; g++) {
    reads[(size_t)g * columns() + column] = clock;
    read_lines[g] = line;
  }
}
static void write(u32 writer, u32 owner, u32 clock, const Clocks& before, u32 address, u32 n, int line) {
  if (outside(address, n, line)) return;
  for (u32 g = address / 2; g <= (address + n - 1) / 2; g++) {
    Word& word = words[g];
    bool plain = writer < COPY && word.writer < COPY;  // both by threads themselves
    bool same = word.writer == writer ? plain || clock == word.clock : plain && word.line == line;
    if (!same && word.writer != owner && word.clock > before[word.writer])
      conflict("write after write", writer, "overwrites", word.writer, word.line, g * 2, line);
    u32* last = &reads[(size_t)g * columns()];
    for (u32 i = 0; i < columns(); i++) {
      u32 who = i < threads ? i : MMA + i - threads;
      if (last[i] <= before[who] || who == owner) continue;
      conflict("write after read", writer, "overwrites", who, read_lines[g], g * 2, line);
      break;
    }
    memset(last, 0, 4 * columns());
    word = {writer, clock, line};
  }
}
static void fence(int t) { fenced[t] = seen[t]; }
static void synchronize(const std::vector<int>& members) {
  Clocks all(ACTORS), all_fenced(ACTORS);
  for (int t : members) { join(all, seen[t]); join(all_fenced, fenced[t]); }
  for (int t : members) { seen[t] = all; fenced[t] = all_fenced; seen[t][t]++; }
}
static void sync_warp(u32 mask) {
  std::vector<int> members;
  for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) members.push_back(thread(lane));
  synchronize(members);
  maybe_give_way();
}

// Memory

static u8* shared_at(int lane, u32 address, u32 n, bool writes, int line) {
  int t = thread(lane);
  if (address % n) find("misaligned in shared memory", address, line);
  if (writes) write(t, t, seen[t][t], seen[t], address, n, line);
  else read(t, t, seen[t][t], seen[t], address, n, line);
  return shared + (address + n <= SHARED ? address : 0);
}
static u8* global_at(u64 address, u32 n, int line) {
  static u8 nowhere[64];
  if (address % n) find("misaligned in global memory", address, line);
  for (int i = 0; i < num_ranges; i++) if (address >= ranges[i].low && address + n <= ranges[i].high) return (u8*)address;
  find("outside the tensors that the kernel was given", 0, line);
  return nowhere;
}

// Barriers

struct Barrier { u32 arrived; std::vector<int> members; };
struct MBarrier { u32 count, pending, phase, index; s64 bytes; Clocks seen, fenced, done, done_fenced; };

static std::map<int, Barrier> barriers;
static std::map<u32, MBarrier> mbarriers;

static void sync_block(int id, u32 count, int line) {
  Barrier& barrier = barriers[id];
  for (int lane = 0; lane < 32; lane++) barrier.members.push_back(thread(lane));
  barrier.arrived += 32;
  warp->line = line;
  if (barrier.arrived > count) find("more threads at a barrier than it expects", id, line);
  if (barrier.arrived < count) { warp->barrier = id; give_way(); return; }
  synchronize(barrier.members);
  for (int t : barrier.members) warps[t / 32].barrier = -1;
  barrier = {};
  maybe_give_way();
}
static MBarrier& mbarrier(u32 address, int line) {
  auto found = mbarriers.find(address);
  if (found != mbarriers.end()) return found->second;
  find("no mbarrier was initialized here", address, line);
  fputs(findings.c_str(), stderr);
  abort();
}
static void init_mbarrier(u32 address, u32 count) {
  u32 index = mbarriers.count(address) ? mbarriers[address].index : mbarriers.size();
  mbarriers[address] = {count, count, 0, index, 0, Clocks(ACTORS), Clocks(ACTORS), Clocks(ACTORS), Clocks(ACTORS)};
}
static void complete(MBarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase++; b.pending = b.count; b.done = b.seen; b.done_fenced = b.fenced;
}
static void arrive(u32 address, int t, u32 count, int line) {
  MBarrier& b = mbarrier(address, line);
  if (b.pending < count) find("more arrivals at an mbarrier than it expects", address, line);
  b.pending -= count;
  join(b.seen, seen[t]); join(b.fenced, fenced[t]); seen[t][t]++;
  complete(b);
}
static void wait(u32 address, u32 parity, int line) {
  MBarrier& b = mbarrier(address, line);
  for (; (b.phase & 1) == (parity & 1); give_way()) { warp->waits = true; warp->line = line; }
  warp->waits = false;
  for (int lane = 0; lane < 32; lane++) { join(seen[thread(lane)], b.done); join(fenced[thread(lane)], b.done_fenced); }
  maybe_give_way();
}

// Copies. A thread's cp.async copies are done in order, TMA's in any order.

struct Copy { bool arrives; u32 to, n, given, bar; u64 from; Clocks before; u32 clock; int line; };
struct Descriptor { u64 base; s64 rows, columns, stride; s32 box_rows, box_columns, itemsize, swizzle; };
struct Fetch { u32 to, bar, clock; Descriptor of; s32 column, row; Clocks before; int line; };

static std::vector<std::deque<Copy>> copies;
static std::vector<u32> copied;  // number of copies that each thread has issued
static std::vector<std::deque<u32>> copy_groups;  // `copied` when each thread committed a group
static std::vector<Fetch> fetches;
static int num_copies;

static void copy(int t, u32 to, u64 from, u32 n, u32 given, int line) {
  copies[t].push_back({false, to, n, given, 0, from, seen[t], ++copied[t], line});
  num_copies++;
}
static void arrive_when_copied(int t, u32 bar, int line) {
  copies[t].push_back({true, 0, 0, 0, bar, 0, seen[t], copied[t], line});
  num_copies++;
}
static void do_copy(int t) {
  Copy c = copies[t].front();
  copies[t].pop_front();
  num_copies--;
  if (c.arrives) {
    MBarrier& b = mbarrier(c.bar, c.line);
    if (!b.pending) find("more arrivals at an mbarrier than it expects", c.bar, c.line);
    b.pending--;
    join(b.seen, c.before);
    b.seen[COPY + t] = std::max(b.seen[COPY + t], c.clock);
    complete(b);
    return;
  }
  write(COPY + t, t, c.clock, c.before, c.to, c.n, c.line);
  if (outside(c.to, c.n, c.line)) return;
  if (c.given) memcpy(shared + c.to, global_at(c.from, c.given, c.line), c.given);
  memset(shared + c.to + c.given, 0, c.n - c.given);
}
static void commit_copies(int t) { copy_groups[t].push_back(copied[t]); }
static void wait_for_copies(int t, int left) {  // for all groups but the last ones; left < 0: for all copies
  u32 last = left < 0 ? copied[t] : 0;
  for (auto& own = copy_groups[t]; (int)own.size() > std::max(left, 0); own.pop_front()) last = std::max(last, own.front());
  while (!copies[t].empty() && copies[t].front().clock <= last) do_copy(t);
  seen[t][COPY + t] = std::max(seen[t][COPY + t], last);
}
static u32 swizzled(u32 address, int width) { return address ^ (address >> 3 & (width - 16)); }  // permutes chunks of 16 bytes
static void fetch(int t, u32 to, u64 descriptor, s32 column, s32 row, u32 bar, int line) {
  fetches.push_back({to, bar, mbarrier(bar, line).phase + 1, *(Descriptor*)descriptor, column, row, fenced[t], line});
}
static void do_fetch(size_t i) {
  Fetch f = fetches[i];
  fetches.erase(fetches.begin() + i);
  const Descriptor& d = f.of;
  u32 width = d.box_columns * d.itemsize;
  if (outside(f.to, d.box_rows * width, f.line)) return;
  for (s32 r = 0; r < d.box_rows; r++)
    for (s32 c = 0; c < d.box_columns; c++) {
      u8* to = shared + swizzled(f.to + r * width + c * d.itemsize, d.swizzle);
      s64 row = f.row + r, column = f.column + c;
      if (row < 0 || row >= d.rows || column < 0 || column >= d.columns) memset(to, 0, d.itemsize);
      else memcpy(to, (u8*)d.base + (row * d.stride + column) * d.itemsize, d.itemsize);
    }
  MBarrier& b = mbarrier(f.bar, f.line);
  u32 who = TMA + b.index;
  write(who, ACTORS, f.clock, f.before, f.to, d.box_rows * width, f.line);
  b.bytes -= d.box_rows * width;
  b.seen[who] = b.fenced[who] = std::max(b.seen[who], f.clock);
  complete(b);
}

// A TMA store reads its tile at once: fences and barriers before it are checked, the wait after it is not.
static void store_tile(int t, u32 from, u64 descriptor, s32 column, s32 row, int line) {
  const Descriptor& d = *(Descriptor*)descriptor;
  u32 width = d.box_columns * d.itemsize;
  if (outside(from, d.box_rows * width, line)) return;
  check_written(TMA, fenced[t], from, d.box_rows * width, line);
  for (s32 r = 0; r < d.box_rows; r++)
    for (s32 c = 0; c < d.box_columns; c++) {
      u8* value = shared + swizzled(from + r * width + c * d.itemsize, d.swizzle);
      s64 at_row = row + r, at_column = column + c;
      if (at_row < 0 || at_row >= d.rows || at_column < 0 || at_column >= d.columns) continue;
      memcpy(global_at(d.base + (at_row * d.stride + at_column) * d.itemsize, d.itemsize, line), value, d.itemsize);
    }
}

// Matrices. A Kind is the type of an operand's values.

enum Kind { F16, BF16, E4M3, TF32 };  // of TF32, the lower 13 bits are cut off
static u32 size_of(Kind kind) { return kind == E4M3 ? 1 : kind == TF32 ? 4 : 2; }
static float from(Kind kind, u32 x) {
  return kind == E4M3 ? from_e4m3(x) : kind == BF16 ? from_bf16(x) : kind == TF32 ? real(x & ~0x1fffu) : from_f16(x);
}
typedef u32* const Registers;  // of a warp: the values of 32 lanes for each

static u32 part(u32 x, int i, u32 size) { return size == 4 ? x : x >> 8 * size * i & ((1u << 8 * size) - 1); }  // the i-th value
static void mma(Kind kind, Registers* d, Registers* a, Registers* b, Registers* c) {  // m16n8k16, of TF32 m16n8k8
  const u32 size = size_of(kind);
  const int K = 32 / size, values = 4 / size;
  float x[16][16], y[16][8], z[16][8];
  for (int l = 0; l < 32; l++) {
    int g = l / 4, q = l % 4;
    for (int h = 0; h < values; h++) {
      for (int i = 0; i < 4; i++) x[g + i % 2 * 8][q * values + h + i / 2 * K / 2] = from(kind, part(a[i][l], h, size));
      for (int i = 0; i < 2; i++) y[q * values + h + i * K / 2][g] = from(kind, part(b[i][l], h, size));
    }
    for (int i = 0; i < 4; i++) z[g + i / 2 * 8][q * 2 + i % 2] = real(c[i][l]);
  }
  for (auto& row : z) { int i = &row - z; for (int j = 0; j < 8; j++) for (int k = 0; k < K; k++) row[j] += x[i][k] * y[k][j]; }
  for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) d[i][l] = bits<u32>(z[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2]);
}
static void move_matrices(Registers* r, const u32* rows, int n, bool transposed, bool stores, int line) {  // 8 × 8, of 16 bits
  for (int i = 0; i < n; i++) {
    u16* at[8];
    for (int k = 0; k < 8; k++) at[k] = (u16*)shared_at(i * 8 + k, rows[i * 8 + k], 16, stores, line);
    for (int l = 0; l < 32; l++) {
      int g = l / 4, q = l % 4 * 2;
      u16 &low = transposed ? at[q][g] : at[g][q], &high = transposed ? at[q + 1][g] : at[g][q + 1];
      if (stores) { low = r[i][l]; high = r[i][l] >> 16; } else r[i][l] = low | (u32)high << 16;
    }
  }
  maybe_give_way();
}
// wgmma computes at once. Its reads last until its group has been waited for, and so long its results are NaN to others.
struct Result { u32* at; u32 value, product; };
static std::vector<u32> products;
static std::vector<std::map<u32*, Result>> results;
static std::vector<std::deque<u32>> groups;
static float element(Kind kind, u64 descriptor, int row, int k, bool rows_first, int line) {  // PTX ISA, "Matrix descriptor"
  u32 size = size_of(kind), base = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  u32 stride = (descriptor >> 32 & 0x3fff) << 4, width = 256 >> (descriptor >> 62), span = width / size;
  if (width == 256) find("wgmma without swizzle is not emulated", base, line);
  if (rows_first && size != 2) find("wgmma takes rows of 16-bit values only", base, line);
  u32 of_rows = base + row / span * leading + row % span * size + k % 8 * width + k / 8 * stride;
  u32 at = swizzled(rows_first ? of_rows : base + row / 8 * stride + row % 8 * width + k * size, width);
  // Values copied by cp.async reach wgmma after a barrier, without a fence, as libraries use it.
  int t = thread(0);
  Word& word = words[std::min(at, SHARED - 2) / 2];
  bool copied = word.writer >= COPY && word.writer < TMA;
  read(threads + warp->id, MMA + warp->id, products[warp->id] + 1, copied ? seen[t] : fenced[t], at & ~1u, std::max(2u, size), line);
  u32 x = 0;
  if (at + size <= SHARED) memcpy(&x, shared + at, size);
  return from(kind, x);
}
static void wgmma(Kind kind, Registers* d, int n, u64 a, Registers* a_registers, u64 b, bool adds, bool a_rows_first,
                  bool b_rows_first, int line) {
  const int K = 32 / size_of(kind), values = K / 8;
  static float x[16][32], y[256][32];
  if (!a_registers)
    for (int i = 0; i < 16; i++) for (int k = 0; k < K; k++) x[i][k] = element(kind, a, warp->id % 4 * 16 + i, k, a_rows_first, line);
  if (a_registers)
    for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) for (int h = 0; h < values; h++)
      x[l / 4 + i % 2 * 8][l % 4 * values + h + i / 2 * K / 2] = from(kind, part(a_registers[i][l], h, size_of(kind)));
  for (int j = 0; j < n; j++) for (int k = 0; k < K; k++) y[j][k] = element(kind, b, j, k, b_rows_first, line);
  auto& own = results[warp->id];
  for (int l = 0; l < 32; l++) for (int i = 0; i < n / 2; i++) {
    auto earlier = own.find(&d[i][l]);
    float sum = !adds ? 0 : real(earlier == own.end() ? d[i][l] : earlier->second.value);
    for (int k = 0; k < K; k++) sum += x[l / 4 + i / 2 % 2 * 8][k] * y[i / 4 * 8 + l % 4 * 2 + i % 2][k];
    own[&d[i][l]] = {&d[i][l], bits<u32>(sum), products[warp->id] + 1};
    d[i][l] = 0x7fffffff;
  }
}
static void commit_group() { groups[warp->id].push_back(++products[warp->id]); }
static void wait_for_groups(size_t left) {
  for (auto& own = groups[warp->id]; own.size() > left; own.pop_front()) {
    for (int l = 0; l < 32; l++) seen[thread(l)][MMA + warp->id] = fenced[thread(l)][MMA + warp->id] = own.front();
    auto& made = results[warp->id];
    for (auto it = made.begin(); it != made.end();)
      if (it->second.product <= own.front()) { *it->first = it->second.value; it = made.erase(it); } else ++it;
  }
  maybe_give_way();
}

// Running

static void kernel();
static void enter() { kernel(); warp->done = true; give_way(); }

static void start_block() {
  barriers.clear(); mbarriers.clear(); fetches.clear(); num_copies = 0;
  copies.assign(threads, {}); copied.assign(threads, 0); copy_groups.assign(threads, {}); products.assign(warps.size(), 0); groups.assign(warps.size(), {});
  results.assign(warps.size(), {});
  memset(shared, 0xff, SHARED);  // NaN
  seen.assign(threads, Clocks(ACTORS)); fenced = seen;
  for (u32 t = 0; t < threads; t++) seen[t][t] = 1;
  words.assign(SHARED / 2, {}); reads.assign((size_t)SHARED / 2 * columns(), 0); read_lines.assign(SHARED / 2, 0);
  for (Warp& w : warps) {
    w.done = w.waits = false; w.barrier = -1;
    w.registers.assign(registers_size, 0); w.stack.resize(4 << 20);
    getcontext(&w.context);
    w.context.uc_stack.ss_sp = w.stack.data(); w.context.uc_stack.ss_size = w.stack.size(); w.context.uc_link = nullptr;
    makecontext(&w.context, enter, 0);
  }
}
static bool run_block() {  // returns whether all warps ended
  start_block();
  for (int idle = 0; idle < 200000;) {
    bool live = false, ready = false, copying = !fetches.empty() || num_copies;
    for (Warp& w : warps) { live |= !w.done; ready |= !w.done && w.barrier < 0 && !w.waits; }
    if (!live) break;
    if (copying && draw(8) < (ready ? 2 : 6)) {
      if (!fetches.empty() && (!num_copies || draw(2))) do_fetch(draw(fetches.size()));
      else { int t = draw(threads); while (copies[t].empty()) t = (t + 1) % threads; do_copy(t); }
      idle = 0;
      continue;
    }
    warp = &warps[draw(warps.size())];
    bool waited = warp->waits;
    if (!warp->done && warp->barrier < 0) swapcontext(&scheduler, &warp->context);
    idle = ready || copying || (waited && !warp->waits) ? 0 : idle + 1;
  }
  for (Warp& w : warps)
    if (!w.done) find(w.barrier >= 0 ? "waits at a barrier for ever" : "waits at an mbarrier for ever", w.id, w.line);
  if (!fetches.empty() || num_copies) find("the block ended with copies on their way", 0, 0);
  return std::all_of(warps.begin(), warps.end(), [](Warp& w) { return w.done; });
}
extern "C" const char* run(const u8* given, const u32* grid, u32 num_threads, u64 seed, const Range* memory, int num) {
  parameters = given; threads = num_threads; ranges = memory; num_ranges = num; state = (seed + 1) * 0x9e3779b97f4a7c15;
  findings.clear(); known.clear();
  if (!shared) shared = (u8*)malloc(SHARED + 64);
  warps.resize(threads / 32);
  for (size_t i = 0; i < warps.size(); i++) warps[i].id = i;
  std::copy(grid, grid + 3, blocks);
  for (block[2] = 0; block[2] < grid[2]; block[2]++)
    for (block[1] = 0; block[1] < grid[1]; block[1]++)
      for (block[0] = 0; block[0] < grid[0]; block[0]++)
        if (!run_block()) return findings.c_str();
  return findings.c_str();
}
