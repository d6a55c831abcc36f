// One decoding step of a Llama-like model on a CPU: matrix products, norms, rotary embeddings, attention over a paged cache, sampling.
//
// Rows are independent: each output is summed in one order, whatever else is in the batch. In bfloat16 every value is rounded where the
// module's own operators round it under autocast; it is kept in float32 registers in between. Compiled by decode_kernels.py, which also
// documents the functions of the C interface at the end of this file. Products and sums are only fused where `fused` says so
// (-ffp-contract=off), so that the rotary embedding and SwiGLU equal torch's to the last bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 8;  // 8 x 3 accumulators of 32 registers
#else
constexpr int LANES = 8;
constexpr int TILE_ROWS = 4;  // 4 x 3 accumulators of 16 registers
#endif
constexpr int TILE_VECTORS = 3;
constexpr int PANEL = LANES * TILE_VECTORS;  // output columns that are computed together
constexpr int ROW_BLOCK = 256;  // rows whose partial sums are kept between two blocks of the inner dimension
constexpr int LINE = 64;

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));

inline vec load(const void* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
inline uvec load_bits(const void* p) { uvec v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
inline vec splat(float x) { return vec{} + x; }

inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The sum of all lanes, halves first: as torch reduces a vector.
inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

inline vec larger(vec a, vec b) { return a > b ? a : b; }

inline vec nearest(vec x) {  // of numbers below 2^22; ties to even
    const vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (x + shift) - shift;
}

inline vec floor_of(vec x) {
    const vec n = nearest(x);
    return n > x ? n - splat(1.0f) : n;
}

inline vec power_of_two(vec n) { return (vec)((__builtin_convertvector(n, ivec) + 127) << 23); }

// exp as torch's softmax and SiLU compute it in float32, to the last bit: the algorithm and the coefficients of SLEEF's expf with an error of
// at most one unit in the last place. Results below the smallest normal number become 0.
inline vec exponential(vec x) {
    const auto tiny = x < splat(-87.3365f);
    x = tiny ? vec{} : (x > splat(104.0f) ? splat(104.0f) : x);  // infinite from 89 on
    const vec n = nearest(x * splat(1.442695040888963407359924681001892137426645954152985934135449406931f));
    vec r = fused(n, splat(-0.693145751953125f), x);
    r = fused(n, splat(-1.428606765330187045e-06f), r);
    vec p = splat(0.000198527617612853646278381f);
    for (float c : {0.00139304355252534151077271f, 0.00833336077630519866943359f, 0.0416664853692054748535156f, 0.166666671633720397949219f, 0.5f})
        p = fused(p, r, splat(c));
    p = splat(1.0f) + fused(r * r, p, r);
    const vec half = floor_of(n * splat(0.5f));
    const vec result = p * power_of_two(half) * power_of_two(n - half);
    return tiny ? vec{} : result;
}

inline vec hyperbolic_tangent(vec x) {
    const vec one = splat(1.0f), magnitude = x < vec{} ? -x : x;
    const vec t = one - splat(2.0f) / (one + exponential(splat(2.0f) * magnitude));
    const vec small = magnitude - magnitude * magnitude * magnitude * splat(1.0f / 3);  // no cancellation near 0
    const vec result = magnitude < splat(0.02f) ? small : t;
    return x < vec{} ? -result : result;
}

// ---------------------------------------------------------------------------------------------------------------- bfloat16

struct bfloat16 { uint16_t bits; };

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float from_bits(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return from_bits((uint32_t)x.bits << 16); }
inline bfloat16 narrow(float x) {  // to the nearest, ties to even
    const uint32_t u = bits_of(x);
    return {(uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <class T> inline T convert(float x);
template <> inline float convert<float>(float x) { return x; }
template <> inline bfloat16 convert<bfloat16>(float x) { return narrow(x); }
template <class T> inline float rounded(float x) { return widen(convert<T>(x)); }
inline vec rounded_vec(vec x, float) { return x; }
inline vec rounded_vec(vec x, bfloat16) {
    const uvec u = (uvec)x;
    return (vec)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}
inline vec load_wide(const float* p) { return load(p); }
inline vec load_wide(const bfloat16* p) {
    typedef uint16_t half __attribute__((vector_size(LANES * 2)));
    half h;
    std::memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}
inline void store_narrow(float* p, vec v) { store(p, v); }
inline void store_narrow(bfloat16* p, vec v) {
    typedef uint16_t half __attribute__((vector_size(LANES * 2)));
    const uvec u = (uvec)v;
    const half h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, half);
    std::memcpy(p, &h, sizeof h);
}

// ---------------------------------------------------------------------------------------------------------------- products

// Weights [outputs, inputs] in panels of PANEL outputs: [panels, inputs, PANEL], in bfloat16 [panels, inputs / 2, PANEL, 2].
struct Matrix {
    const void* panels;
    const float* bias;  // [outputs] or null
    int64_t outputs, inputs;
    int64_t block;  // inputs that are summed from zero before they are added to the sum of those before them
    int64_t count() const { return (outputs + PANEL - 1) / PANEL; }
};

// Steps of the inner loop: one input in float32, two in bfloat16; both read 3 cache lines of a panel.
template <class T> constexpr int PER_STEP = sizeof(T) == 2 ? 2 : 1;
template <class T> constexpr int64_t STEP_BYTES = PANEL * 4;

inline void multiply(vec& acc, const float* x, const char* w) { acc = fused(splat(*x), load(w), acc); }
inline void multiply(vec& acc, const bfloat16* x, const char* w) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
#if defined(__AVX512BF16__) && !defined(STROP_WIDEN)
    acc = (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)_mm512_loadu_si512(w));
#else
    const uvec both = load_bits(w);
    acc = fused(splat(from_bits(pair << 16)), (vec)(both << 16), acc);
    acc = fused(splat(from_bits(pair & 0xffff0000u)), (vec)(both & 0xffff0000u), acc);
#endif
}

struct Prefetch {  // of the memory that is needed next, a few lines at every step
    const char* next;
    const char* end;
    int lines;
    inline void step() {
        for (int i = 0; i < lines; ++i, next += LINE) {
            if (next < end) __builtin_prefetch(next, 0, 2);
        }
    }
};

// out [ROWS, PANEL] = or += x [ROWS, steps] * panel, which is summed on its own first
template <int ROWS, class T>
void tile(const T* x, int64_t stride, const char* w, int64_t steps, float* out, bool first, Prefetch& ahead) {
    vec acc[ROWS][TILE_VECTORS] = {};
    for (int64_t s = 0; s < steps; ++s, x += PER_STEP<T>, w += STEP_BYTES<T>) {
        ahead.step();
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 3
            for (int v = 0; v < TILE_VECTORS; ++v) multiply(acc[r][v], x + r * stride, w + v * LANES * 4);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < TILE_VECTORS; ++v) {
            float* to = out + r * PANEL + v * LANES;
            store(to, first ? acc[r][v] : load(to) + acc[r][v]);
        }
}

template <class T>
void tile_rows(int rows, const T* x, int64_t stride, const char* w, int64_t steps, float* out, bool first, Prefetch& ahead) {
    switch (rows) {
        case 1: return tile<1, T>(x, stride, w, steps, out, first, ahead);
        case 2: return tile<2, T>(x, stride, w, steps, out, first, ahead);
        case 3: return tile<3, T>(x, stride, w, steps, out, first, ahead);
        case 4: return tile<4, T>(x, stride, w, steps, out, first, ahead);
#if defined(__AVX512F__)
        case 5: return tile<5, T>(x, stride, w, steps, out, first, ahead);
        case 6: return tile<6, T>(x, stride, w, steps, out, first, ahead);
        case 7: return tile<7, T>(x, stride, w, steps, out, first, ahead);
        case 8: return tile<8, T>(x, stride, w, steps, out, first, ahead);
#endif
    }
}

// sums [rows, PANEL] = x [rows, inputs] * one panel, rows <= ROW_BLOCK. `after`: the memory that is read next.
template <class T>
void multiply_panel(const T* x, int64_t rows, const Matrix& m, int64_t panel, float* sums, const char* after, int64_t after_bytes) {
    const int64_t steps = m.inputs / PER_STEP<T>;
    const char* w = (const char*)m.panels + panel * steps * STEP_BYTES<T>;
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    Prefetch ahead{after, after + after_bytes, after_bytes ? (int)((TILE_VECTORS + tiles - 1) / tiles) : 0};
    for (int64_t from = 0; from < steps; from += m.block / PER_STEP<T>) {
        const int64_t some = std::min<int64_t>(m.block / PER_STEP<T>, steps - from);
        for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly the same height
            const int64_t row = rows * t / tiles;
            tile_rows<T>((int)(rows * (t + 1) / tiles - row), x + row * m.inputs + from * PER_STEP<T>, m.inputs, w + from * STEP_BYTES<T>,
                         some, sums + row * PANEL, from == 0, ahead);
        }
    }
}

// Pack or unpack: weights [outputs, inputs] in float32 <-> panels; outputs beyond the last are 0.
template <class T> inline T* packed_place(T* panels, int64_t inputs, int64_t output, int64_t input) {
    constexpr int64_t pairs = PER_STEP<T>;
    return panels + (output / PANEL * inputs + input / pairs * pairs) * PANEL + output % PANEL * pairs + input % pairs;
}

template <class T> void pack(const float* weights, int64_t outputs, int64_t inputs, T* panels, int threads) {
    const int64_t padded = (outputs + PANEL - 1) / PANEL * PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < padded; first += PANEL)
        for (int64_t from = 0; from < inputs; from += LANES)  // a block that stays in the L1 cache
            for (int64_t output = first; output < first + PANEL; ++output)
                for (int64_t input = from; input < std::min<int64_t>(from + LANES, inputs); ++input)
                    *packed_place(panels, inputs, output, input) = convert<T>(output < outputs ? weights[output * inputs + input] : 0.0f);
}

template <class T> void unpack(const T* panels, int64_t outputs, int64_t inputs, T* weights, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += PANEL)
        for (int64_t from = 0; from < inputs; from += LANES)
            for (int64_t output = first; output < std::min<int64_t>(first + PANEL, outputs); ++output)
                for (int64_t input = from; input < std::min<int64_t>(from + LANES, inputs); ++input)
                    weights[output * inputs + input] = *packed_place(panels, inputs, output, input);
}

inline int64_t share(int64_t count, int index, int of) { return count * index / of; }

struct Team { int index, size; };

template <class T> void add_bias(float* sums, int64_t rows, const Matrix& m, int64_t column, int width) {
    if (!m.bias) return;
    for (int64_t r = 0; r < rows; ++r)
        for (int c = 0; c < width; ++c) sums[r * PANEL + c] += m.bias[column + c];
}

template <class T> void write_panel(const float* sums, int64_t rows, T* out, int64_t stride, int width) {
    for (int64_t r = 0; r < rows; ++r) {
        if (width == PANEL)
            for (int v = 0; v < TILE_VECTORS; ++v) store_narrow(out + r * stride + v * LANES, load(sums + r * PANEL + v * LANES));
        else
            for (int c = 0; c < width; ++c) out[r * stride + c] = convert<T>(sums[r * PANEL + c]);
    }
}

// out [rows, total] = x [rows, inputs] times several matrices, side by side; this thread's share of the panels.
template <class T> void product(const T* x, int64_t rows, const Matrix* const* matrices, int count, T* out, Team team) {
    int64_t panels = 0, total = 0;
    for (int i = 0; i < count; ++i) panels += matrices[i]->count(), total += matrices[i]->outputs;
    const int64_t first = share(panels, team.index, team.size), last = share(panels, team.index + 1, team.size);
    alignas(LINE) float sums[ROW_BLOCK * PANEL];
    int64_t before = 0, offset = 0;  // panels and columns of the matrices before this one
    for (int i = 0; i < count; ++i) {
        const Matrix& m = *matrices[i];
        const int64_t bytes = m.inputs / PER_STEP<T> * STEP_BYTES<T>;
        for (int64_t p = std::max<int64_t>(first - before, 0); p < std::min(last - before, m.count()); ++p) {
            const int64_t column = p * PANEL;
            const int width = (int)std::min<int64_t>(PANEL, m.outputs - column);
            const bool more = p + 1 < std::min(last - before, m.count());
            for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
                const int64_t some = std::min<int64_t>(ROW_BLOCK, rows - row);
                multiply_panel<T>(x + row * m.inputs, some, m, p, sums, (const char*)m.panels + (p + 1) * bytes, more && !row ? bytes : 0);
                add_bias<T>(sums, some, m, column, width);
                write_panel<T>(sums, some, out + row * total + offset + column, total, width);
            }
        }
        before += m.count(), offset += m.outputs;
    }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

template <class T> inline vec activate(vec gate, int kind) {
    const vec one = splat(1.0f);
    if (kind == SILU) return rounded_vec(gate / (one + exponential(-gate)), T{});
    const vec inner = splat(0.79788456080286536f) * (gate + splat(0.044715f) * (gate * gate * gate));
    return rounded_vec(splat(0.5f) * gate * (one + hyperbolic_tangent(inner)), T{});
}

// out [rows, intermediate] = act(x gate) * (x up): a thread computes the same columns of both.
template <class T> void gated(const T* x, int64_t rows, const Matrix& gate, const Matrix& up, int kind, T* out, Team team) {
    const int64_t first = share(gate.count(), team.index, team.size), last = share(gate.count(), team.index + 1, team.size);
    const int64_t bytes = gate.inputs / PER_STEP<T> * STEP_BYTES<T>;
    alignas(LINE) float sums[2][ROW_BLOCK * PANEL];
    for (int64_t p = first; p < last; ++p) {
        const int width = (int)std::min<int64_t>(PANEL, gate.outputs - p * PANEL);
        for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
            const int64_t some = std::min<int64_t>(ROW_BLOCK, rows - row);
            const T* from = x + row * gate.inputs;
            multiply_panel<T>(from, some, gate, p, sums[0], (const char*)up.panels + p * bytes, row ? 0 : bytes);
            multiply_panel<T>(from, some, up, p, sums[1], (const char*)gate.panels + (p + 1) * bytes, row || p + 1 == last ? 0 : bytes);
            add_bias<T>(sums[0], some, gate, p * PANEL, width);
            add_bias<T>(sums[1], some, up, p * PANEL, width);
            for (int64_t i = 0; i < some * PANEL; i += LANES) {
                const vec g = rounded_vec(load(sums[0] + i), T{}), u = rounded_vec(load(sums[1] + i), T{});
                store(sums[0] + i, activate<T>(g, kind) * u);
            }
            write_panel<T>(sums[0], some, out + row * gate.outputs + p * PANEL, gate.outputs, width);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- norms

// The sum of squares of a row, in the order of torch.sum on x86: four running vectors of eight, each summed in blocks of 2^k that are summed
// in turn.
inline float sum_squares(const float* x, int64_t size) {
    typedef float octet __attribute__((vector_size(32)));
    constexpr int CHAINS = 4, LEVELS = 4, WIDTH = 8;
    auto square = [&](int64_t v) {
        octet a;
        std::memcpy(&a, x + v * WIDTH, sizeof a);
        return a * a;
    };
    const int64_t vectors = size / WIDTH, rounds = vectors / CHAINS;
    int bits = 0;
    while ((int64_t{1} << bits) < rounds) ++bits;
    const int power = std::max(4, bits / LEVELS);
    const int64_t step = int64_t{1} << power, mask = step - 1;
    octet acc[LEVELS][CHAINS] = {};
    int64_t i = 0;
    while (i + step <= rounds) {
        for (int64_t j = 0; j < step; ++j, ++i)
            for (int c = 0; c < CHAINS; ++c) acc[0][c] += square(i * CHAINS + c);
        for (int level = 1; level < LEVELS; ++level) {
            for (int c = 0; c < CHAINS; ++c) acc[level][c] += acc[level - 1][c], acc[level - 1][c] = octet{};
            if ((i & (mask << (level * power))) != 0) break;
        }
    }
    for (; i < rounds; ++i)
        for (int c = 0; c < CHAINS; ++c) acc[0][c] += square(i * CHAINS + c);
    for (int level = 1; level < LEVELS; ++level)
        for (int c = 0; c < CHAINS; ++c) acc[0][c] += acc[level][c];
    for (int64_t v = rounds * CHAINS; v < vectors; ++v) acc[0][0] += square(v);
    for (int c = 1; c < CHAINS; ++c) acc[0][0] += acc[0][c];
    float total = 0;
    for (int64_t e = vectors * WIDTH; e < size; ++e) total += x[e] * x[e];
    for (int lane = 0; lane < WIDTH; ++lane) total += acc[0][0][lane];
    return total;
}

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_squares(x, size) / (float)size + eps);
}

// Norm of a row in the data type of the linear layers' outputs. `late`: the result is rounded (Gemma), not the normalised row (Llama).
template <class T> void norm_row(float* x, const float* weight, int64_t size, float eps, bool late) {
    const float scale = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; ++i) x[i] = late ? rounded<T>(x[i] * scale * weight[i]) : rounded<T>(x[i] * scale) * weight[i];
}

// residual += addend; out = norm(residual), in the data type that the linear layers read.
template <class T>
void add_and_norm(float* residual, const T* addend, const float* addend_norm, const float* weight, int64_t size, float eps, bool late, T* out) {
    if (addend && addend_norm) {
        float* row = (float*)__builtin_alloca(size * 4);
        for (int64_t i = 0; i < size; ++i) row[i] = widen(addend[i]);
        norm_row<T>(row, addend_norm, size, eps, late);
        for (int64_t i = 0; i < size; ++i) residual[i] += row[i];
    } else if (addend) {
        for (int64_t i = 0; i < size; ++i) residual[i] += widen(addend[i]);
    }
    const float scale = inverse_rms(residual, size, eps);
    for (int64_t i = 0; i < size; ++i) out[i] = convert<T>(residual[i] * scale * weight[i]);
}

// ---------------------------------------------------------------------------------------------------------------- attention

struct Cache {  // keys and values [pages, kv_heads, page, D]
    void* keys;
    void* values;
    int64_t page, heads, size;
    template <class T> T* at(void* base, int64_t page_index, int64_t head, int64_t slot) const {
        return (T*)base + ((page_index * heads + head) * page + slot) * size;
    }
};

struct Options { float scale, softcap; int64_t window; };  // softcap and window 0: none

// scores[g * stride + j] = q[g] . k[j] for GROUP query heads and `count` keys
template <int GROUP> void dot_keys(const float* q, const float* k, int64_t count, int64_t size, float* scores, int64_t stride) {
    for (int64_t j = 0; j < count; ++j, k += size) {
        vec acc[GROUP] = {};
        int64_t d = 0;
        for (; d + LANES <= size; d += LANES) {
            const vec key = load(k + d);
            for (int g = 0; g < GROUP; ++g) acc[g] = fused(load(q + g * size + d), key, acc[g]);
        }
        for (int g = 0; g < GROUP; ++g) {
            float total = sum(acc[g]);
            for (int64_t e = d; e < size; ++e) total += q[g * size + e] * k[e];
            scores[g * stride + j] = total;
        }
    }
}
#if defined(__AVX512BF16__) && !defined(STROP_WIDEN)
// Transpose 16 x 16 numbers of 32 bits.
inline void transpose(__m512i* rows) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i low = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), high = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), high2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        rows[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}
#endif

// In bfloat16 each product is summed pair by pair, as oneDNN does: its rounded scores are those of the learner.
template <int GROUP> void dot_keys(const bfloat16* q, const bfloat16* k, int64_t count, int64_t size, float* scores, int64_t stride) {
#if defined(__AVX512BF16__) && !defined(STROP_WIDEN)
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t some = std::min<int64_t>(LANES, count - j);
        vec acc[GROUP] = {};
        for (int64_t d = 0; d < size; d += 2 * LANES) {
            const int pairs = (int)std::min<int64_t>(LANES, (size - d) / 2);
            const __mmask16 mask = (__mmask16)((1u << pairs) - 1);
            __m512i rows[LANES];  // after the transposition: one pair of 16 keys each
            for (int64_t i = 0; i < LANES; ++i) rows[i] = _mm512_maskz_loadu_epi32(i < some ? mask : 0, k + (j + std::min(i, some - 1)) * size + d);
            transpose(rows);
            for (int p = 0; p < pairs; ++p)
                for (int g = 0; g < GROUP; ++g) {
                    int pair;
                    std::memcpy(&pair, q + g * size + d + 2 * p, 4);
                    acc[g] = (vec)_mm512_dpbf16_ps((__m512)acc[g], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)rows[p]);
                }
        }
        for (int g = 0; g < GROUP; ++g) _mm512_mask_storeu_ps(scores + g * stride + j, (__mmask16)((1u << some) - 1), (__m512)acc[g]);
    }
#else
    for (int64_t j = 0; j < count; ++j, k += size)
        for (int g = 0; g < GROUP; ++g) {
            float total = 0;
            for (int64_t e = 0; e < size; ++e) total += widen(q[g * size + e]) * widen(k[e]);
            scores[g * stride + j] = total;
        }
#endif
}

// The order of the keys: in bfloat16 the second of a pair first, as the processor's product of pairs has it.
template <class T> inline int64_t in_order(int64_t j, int64_t count) {
    return sizeof(T) == 2 && (j ^ 1) < count ? j ^ 1 : j;
}

// out[g] += sum over j of weights[g * stride + j] * v[j]
template <int GROUP, class T> void add_values(const float* weights, int64_t stride, const T* v, int64_t count, int64_t size, float* out) {
    int64_t d = 0;
    constexpr int WIDE = 4;  // vectors of a head at once
    for (; d + WIDE * LANES <= size; d += WIDE * LANES) {
        vec acc[GROUP][WIDE];
        for (int g = 0; g < GROUP; ++g)
            for (int i = 0; i < WIDE; ++i) acc[g][i] = load(out + g * size + d + i * LANES);
        for (int64_t n = 0; n < count; ++n) {
            const int64_t j = in_order<T>(n, count);
            for (int i = 0; i < WIDE; ++i) {
                const vec value = load_wide(v + j * size + d + i * LANES);
                for (int g = 0; g < GROUP; ++g) acc[g][i] = fused(splat(weights[g * stride + j]), value, acc[g][i]);
            }
        }
        for (int g = 0; g < GROUP; ++g)
            for (int i = 0; i < WIDE; ++i) store(out + g * size + d + i * LANES, acc[g][i]);
    }
    for (; d < size; ++d)
        for (int64_t n = 0; n < count; ++n) {
            const int64_t j = in_order<T>(n, count);
            for (int g = 0; g < GROUP; ++g) out[g * size + d] = std::fma(weights[g * stride + j], widen(v[j * size + d]), out[g * size + d]);
        }
}

// Softmax over scores, of which the first `hidden` and those from `count` on are left out.
template <class T> void cap_and_softmax(float* scores, int64_t hidden, int64_t count, float softcap) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    auto hide = [&] {
        for (int64_t j = 0; j < hidden; ++j) scores[j] = -INFINITY;
        for (int64_t j = count; j < padded; ++j) scores[j] = -INFINITY;
    };
    if (softcap != 0)
        for (int64_t j = 0; j < padded; j += LANES) {
            const vec s = rounded_vec(rounded_vec(load(scores + j), T{}) / splat(softcap), T{});
            store(scores + j, rounded_vec(rounded_vec(hyperbolic_tangent(s), T{}) * splat(softcap), T{}));
        }
    hide();
    vec top = splat(-INFINITY);
    for (int64_t j = 0; j < padded; j += LANES) {
        const vec s = rounded_vec(load(scores + j), T{});
        store(scores + j, s);
        top = larger(top, s);
    }
    float peak = top[0];
    for (int i = 1; i < LANES; ++i) peak = std::max(peak, top[i]);
    vec mass{};
    for (int64_t j = 0; j < padded; j += LANES) {
        const vec e = exponential(load(scores + j) - splat(peak));
        store(scores + j, e);
        mass += e;
    }
    const vec share = splat(1.0f / sum(mass));
    for (int64_t j = 0; j < padded; j += LANES) store(scores + j, rounded_vec(load(scores + j) * share, T{}));
}

// A head's part of a page is too short for the processor to guess where the next one is: it is fetched into the second-level cache, this many
// bytes ahead.
constexpr int64_t AHEAD = 4096;

template <class T> inline void fetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

// Attention of GROUP query heads, [GROUP, D] scaled, over the keys of one key-value head.
template <int GROUP, class T>
void attend_group(const T* q, const Cache& cache, const int32_t* table, int64_t head, int64_t length, const Options& options, float* scores,
                  int64_t stride, T* out) {
    const int64_t size = cache.size, seen = options.window ? std::max<int64_t>(0, length - options.window) : 0;
    const int64_t first = seen / LANES * LANES;  // whole vectors: sums then have the same order with and without a window
    const int64_t ahead = std::max<int64_t>(1, AHEAD / (cache.page * size * (int64_t)sizeof(T))), last = (length - 1) / cache.page;
    auto over_pages = [&](void* base, auto&& visit) {
        for (int64_t j = first; j < length;) {
            const int64_t slot = j % cache.page, some = std::min(cache.page - slot, length - j), page = j / cache.page;
            if (page + ahead <= last) fetch(cache.at<T>(base, table[page + ahead], head, 0), cache.page * size);
            visit(j, some, table[page], slot);
            j += some;
        }
    };
    over_pages(cache.keys, [&](int64_t j, int64_t some, int64_t page, int64_t slot) {
        dot_keys<GROUP>(q, cache.at<T>(cache.keys, page, head, slot), some, size, scores + (j - first), stride);
    });
    for (int g = 0; g < GROUP; ++g) cap_and_softmax<T>(scores + g * stride, seen - first, length - first, options.softcap);
    float* sums = (float*)__builtin_alloca(GROUP * size * 4);
    std::memset(sums, 0, GROUP * size * 4);
    over_pages(cache.values, [&](int64_t j, int64_t some, int64_t page, int64_t slot) {
        add_values<GROUP, T>(scores + (j - first), stride, cache.at<T>(cache.values, page, head, slot), some, size, sums);
    });
    for (int64_t i = 0; i < GROUP * size; ++i) out[i] = convert<T>(sums[i]);
}

// All `heads` query heads of one key-value head, [heads, D], scaled. `scores`: room for 4 x stride.
template <class T>
void attend_head(const T* q, int64_t heads, const Cache& cache, const int32_t* table, int64_t head, int64_t length, const Options& options,
                 float* scores, int64_t stride, T* out) {
    for (int64_t g = 0; g < heads;) {
        const T* from = q + g * cache.size;
        T* to = out + g * cache.size;
        switch (std::min<int64_t>(4, heads - g)) {
            case 4: attend_group<4, T>(from, cache, table, head, length, options, scores, stride, to); g += 4; break;
            case 3: attend_group<3, T>(from, cache, table, head, length, options, scores, stride, to); g += 3; break;
            case 2: attend_group<2, T>(from, cache, table, head, length, options, scores, stride, to); g += 2; break;
            default: attend_group<1, T>(from, cache, table, head, length, options, scores, stride, to); g += 1;
        }
    }
}

// Norm (if any) and rotary embedding of one head, in float32; rounded to T, then scaled and rounded again.
template <class T>
void rotate(const T* x, const float* weight, float eps, bool late, const float* cosine, const float* sine, int64_t size, float scale, T* out) {
    float* row = (float*)__builtin_alloca(size * 4);
    for (int64_t i = 0; i < size; ++i) row[i] = widen(x[i]);
    if (weight) norm_row<T>(row, weight, size, eps, late);
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float low = row[i] * cosine[i] + -row[i + half] * sine[i];
        const float high = row[i + half] * cosine[i + half] + row[i] * sine[i + half];
        out[i] = convert<T>(rounded<T>(low) * scale);
        out[i + half] = convert<T>(rounded<T>(high) * scale);
    }
}

// ---------------------------------------------------------------------------------------------------------------- a whole step

struct Layer {
    Matrix query, key, value, output, gate, up, down;
    const float *input_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm, *query_norm, *key_norm;  // [hidden] or [D]; null: none
    void *keys, *values;
    float scale, softcap;
    int64_t window;
};

struct Model {
    const Layer* layers;
    Matrix head;
    const float* final_norm;
    int64_t count, hidden, heads, kv_heads, head_size, intermediate;
    float eps;
    int32_t late_rounding, activation;
};

struct Step {
    const int64_t* positions;  // [B]
    const int32_t* table;  // [B, width]
    const float *cosines, *sines;  // [positions, D]
    float* residual;  // [B, hidden]; the embeddings of the tokens
    void* logits;  // [B, V]
    float* states;  // [B, captures, hidden]; what some layers put out
    const int64_t* captured;  // [captures] those layers
    int64_t batch, width, page, threads, captures;
};

template <class T> struct Buffers {
    T *input, *projected, *attended, *activated, *added;
    float* scores;
    int64_t stride;
};

// Write the keys and values of all rows, before any of them is attended to: several rows may be of one sequence.
template <class T> void write_phase(const Model& model, const Layer& layer, const Step& step, const Buffers<T>& buffers, Team team) {
    const int64_t size = model.head_size, width = (model.heads + 2 * model.kv_heads) * size;
    const Cache cache{layer.keys, layer.values, step.page, model.kv_heads, size};
    for (int64_t item = team.index; item < step.batch * model.kv_heads; item += team.size) {
        const int64_t row = item / model.kv_heads, head = item % model.kv_heads, position = step.positions[row];
        const T* projected = buffers.projected + row * width;
        const float *cosine = step.cosines + position * size, *sine = step.sines + position * size;
        const int64_t page = step.table[row * step.width + position / step.page], slot = position % step.page;
        rotate<T>(projected + (model.heads + head) * size, layer.key_norm, model.eps, model.late_rounding, cosine, sine, size, 1.0f,
                  cache.at<T>(cache.keys, page, head, slot));
        std::memcpy(cache.at<T>(cache.values, page, head, slot), projected + (model.heads + model.kv_heads + head) * size, size * sizeof(T));
    }
}

template <class T>
void attention_phase(const Model& model, const Layer& layer, const Step& step, const Buffers<T>& buffers, Team team) {
    const int64_t size = model.head_size, group = model.heads / model.kv_heads, width = (model.heads + 2 * model.kv_heads) * size;
    const Cache cache{layer.keys, layer.values, step.page, model.kv_heads, size};
    const Options options{layer.scale, layer.softcap, layer.window};
    T* queries = (T*)__builtin_alloca(group * size * sizeof(T));
    for (int64_t item = team.index; item < step.batch * model.kv_heads; item += team.size) {
        const int64_t row = item / model.kv_heads, head = item % model.kv_heads, position = step.positions[row];
        const T* projected = buffers.projected + row * width;
        const float *cosine = step.cosines + position * size, *sine = step.sines + position * size;
        const int32_t* table = step.table + row * step.width;
        for (int64_t g = 0; g < group; ++g)
            rotate<T>(projected + (head * group + g) * size, layer.query_norm, model.eps, model.late_rounding, cosine, sine, size,
                      layer.scale, queries + g * size);
        attend_head<T>(queries, group, cache, table, head, position + 1, options, buffers.scores + team.index * 4 * buffers.stride,
                       buffers.stride, buffers.attended + (row * model.heads + head * group) * size);
    }
}

template <class T>
void norm_phase(const Model& model, const Step& step, const T* addend, const float* addend_norm, const float* weight, T* out, Team team) {
    for (int64_t row = share(step.batch, team.index, team.size); row < share(step.batch, team.index + 1, team.size); ++row)
        add_and_norm<T>(step.residual + row * model.hidden, addend ? addend + row * model.hidden : nullptr, addend_norm, weight, model.hidden,
                        model.eps, model.late_rounding, out + row * model.hidden);
}

// Copy what a layer has put out, if it is asked for. Each thread copies the rows that it has just added up in norm_phase.
inline void capture_phase(const Model& model, const Step& step, int64_t layer, Team team) {
    for (int64_t c = 0; c < step.captures; ++c)
        if (step.captured[c] == layer)
            for (int64_t row = share(step.batch, team.index, team.size); row < share(step.batch, team.index + 1, team.size); ++row)
                std::memcpy(step.states + (row * step.captures + c) * model.hidden, step.residual + row * model.hidden, model.hidden * sizeof(float));
}

template <class T> void run_layers(const Model& model, const Step& step, const Buffers<T>& buffers, Team team) {
    const T* added = nullptr;
    const float* added_norm = nullptr;
    for (int64_t i = 0; i < model.count; ++i) {
        const Layer& layer = model.layers[i];
        norm_phase<T>(model, step, added, added_norm, layer.input_norm, buffers.input, team);
        capture_phase(model, step, i - 1, team);
#pragma omp barrier
        const Matrix* projections[] = {&layer.query, &layer.key, &layer.value};
        product<T>(buffers.input, step.batch, projections, 3, buffers.projected, team);
#pragma omp barrier
        write_phase<T>(model, layer, step, buffers, team);
#pragma omp barrier
        attention_phase<T>(model, layer, step, buffers, team);
#pragma omp barrier
        const Matrix* output = &layer.output;
        product<T>(buffers.attended, step.batch, &output, 1, buffers.added, team);
#pragma omp barrier
        norm_phase<T>(model, step, buffers.added, layer.attention_out_norm, layer.mlp_norm, buffers.input, team);
#pragma omp barrier
        gated<T>(buffers.input, step.batch, layer.gate, layer.up, model.activation, buffers.activated, team);
#pragma omp barrier
        const Matrix* down = &layer.down;
        product<T>(buffers.activated, step.batch, &down, 1, buffers.added, team);
#pragma omp barrier
        added = buffers.added, added_norm = layer.mlp_out_norm;
    }
    norm_phase<T>(model, step, added, added_norm, model.final_norm, buffers.input, team);
    capture_phase(model, step, model.count - 1, team);
#pragma omp barrier
    const Matrix* head = &model.head;
    product<T>(buffers.input, step.batch, &head, 1, (T*)step.logits, team);
}

struct Free { void operator()(void* p) const { std::free(p); } };
template <class T> using Block = std::unique_ptr<T[], Free>;
template <class T> Block<T> allocate(int64_t count) {
    return Block<T>((T*)std::aligned_alloc(LINE, (count * sizeof(T) + LINE) / LINE * LINE));
}

template <class T> void decode(const Model& model, const Step& step) {
    int64_t longest = 0;
    for (int64_t b = 0; b < step.batch; ++b) longest = std::max(longest, step.positions[b] + 1);
    const int64_t stride = (longest + LANES) / LANES * LANES, queries = model.heads * model.head_size;
    auto input = allocate<T>(step.batch * model.hidden), added = allocate<T>(step.batch * model.hidden);
    auto projected = allocate<T>(step.batch * (queries + 2 * model.kv_heads * model.head_size)), attended = allocate<T>(step.batch * queries);
    auto activated = allocate<T>(step.batch * model.intermediate);
    auto scores = allocate<float>(step.threads * 4 * stride);
    const Buffers<T> buffers{input.get(), projected.get(), attended.get(), activated.get(), added.get(), scores.get(), stride};
#pragma omp parallel num_threads((int)step.threads)
    run_layers<T>(model, step, buffers, {omp_get_thread_num(), omp_get_num_threads()});
}

template <class T>
void attend_pages(const T* query, const Cache& cache, const int32_t* table, int64_t width, const int32_t* lengths, int64_t batch,
                  int64_t heads, const Options& options, int threads, T* out) {
    const int64_t size = cache.size, group = heads / cache.heads, stride = (width * cache.page + LANES) / LANES * LANES;
    auto scores = allocate<float>(threads * 4 * stride);
#pragma omp parallel num_threads(threads)
    {
        const Team team{omp_get_thread_num(), omp_get_num_threads()};
        T* scaled = (T*)__builtin_alloca(group * size * sizeof(T));
        for (int64_t item = team.index; item < batch * cache.heads; item += team.size) {
            const int64_t row = item / cache.heads, head = item % cache.heads, offset = (row * heads + head * group) * size;
            for (int64_t i = 0; i < group * size; ++i) scaled[i] = convert<T>(widen(query[offset + i]) * options.scale);
            attend_head<T>(scaled, group, cache, table + row * width, head, lengths[row], options, scores.get() + team.index * 4 * stride,
                           stride, out + offset);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- sampling

constexpr int SEARCH_BLOCK = 256;  // as in sampler.py

struct Sample { int64_t token; float logprob, entropy; };

template <class T> inline vec scaled_logits(const T* logits, float temperature) {
    const vec x = load_wide(logits);
    return temperature == 1.0f ? x : x / splat(temperature);
}

template <class T> inline float scaled_logit(const T* logits, float temperature) {
    return temperature == 1.0f ? widen(*logits) : widen(*logits) / temperature;
}

template <class T> float peak_logit(const T* logits, int64_t count, float temperature) {
    vec top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) top = larger(top, scaled_logits(logits + i, temperature));
    float peak = -INFINITY;
    for (int l = 0; l < LANES; ++l) peak = std::max(peak, top[l]);
    for (; i < count; ++i) peak = std::max(peak, scaled_logit(logits + i, temperature));
    return peak;
}

// Weights exp(logit - peak) of up to SEARCH_BLOCK logits, zeros after them; returns their sum and adds sum(w * (logit - peak)).
template <class T>
float block_weights(const T* logits, int64_t count, float temperature, float peak, float* weights, float* weighted) {
    vec mass{}, moment{};
    for (int64_t i = 0; i < count; i += LANES) {
        vec below = splat(-INFINITY);
        if (i + LANES <= count) below = scaled_logits(logits + i, temperature) - splat(peak);
        else for (int64_t l = i; l < count; ++l) below[l - i] = scaled_logit(logits + l, temperature) - peak;
        const vec weight = exponential(below);
        if (weights) store(weights + i, weight);
        mass += weight;
        moment += weight > vec{} ? weight * below : vec{};
    }
    *weighted += sum(moment);
    return sum(mass);
}

template <class T> Sample sample_row(const T* logits, int64_t count, float temperature, float uniform, float* sums) {
    const int64_t blocks = (count + SEARCH_BLOCK - 1) / SEARCH_BLOCK;
    const float peak = peak_logit(logits, count, temperature);
    float total = 0, moment = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t some = std::min<int64_t>(SEARCH_BLOCK, count - b * SEARCH_BLOCK);
        float weighted = 0;
        total += block_weights(logits + b * SEARCH_BLOCK, some, temperature, peak, (float*)nullptr, &weighted);
        moment += weighted;
        sums[b] = total;
    }
    const float target = std::min(uniform * total, std::nextafter(total, 0.0f));
    // Sums that are not finite exceed nothing: the log-probability tells, and the token stays inside.
    const int64_t block = std::min<int64_t>(std::upper_bound(sums, sums + blocks, target) - sums, blocks - 1);
    const float remainder = std::max(target - (block ? sums[block - 1] : 0.0f), 0.0f);
    const int64_t first = block * SEARCH_BLOCK, some = std::min<int64_t>(SEARCH_BLOCK, count - first);
    alignas(LINE) float weights[SEARCH_BLOCK + LANES];
    float unused = 0, running = 0;
    block_weights(logits + first, some, temperature, peak, weights, &unused);
    int64_t chosen = 0;
    for (int64_t i = 0; i < some; ++i) {
        if (weights[i] > 0) {
            running += weights[i];
            chosen = i;  // the last one of positive weight, if rounding lets none exceed the remainder
            if (running > remainder) break;
        }
    }
    const float mass = std::log(total);
    return {first + chosen, scaled_logit(logits + first + chosen, temperature) - peak - mass, mass - moment / total};
}

template <class T>
void sample_rows(const T* logits, int64_t rows, int64_t count, float temperature, const float* uniforms, int threads, int64_t* tokens,
                 float* logprobs, float* entropies) {
    const int64_t blocks = (count + SEARCH_BLOCK - 1) / SEARCH_BLOCK;
#pragma omp parallel num_threads(threads)
    {
        auto sums = allocate<float>(blocks);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) {
            const Sample s = sample_row(logits + r * count, count, temperature, uniforms[r], sums.get());
            tokens[r] = s.token, logprobs[r] = s.logprob, entropies[r] = s.entropy;
        }
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------- C interface
// `half` chooses bfloat16 instead of float32 for activations, weights, keys, values and logits.

extern "C" {

int strop_panel() { return PANEL; }

int strop_vector_lanes() {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return LANES;
#else
    return 0;
#endif
}

void strop_decode(const Model* model, const Step* step, int half) {
    if (half) decode<bfloat16>(*model, *step);
    else decode<float>(*model, *step);
}

void strop_pack(const float* weights, int64_t outputs, int64_t inputs, void* panels, int threads, int half) {
    if (half) pack(weights, outputs, inputs, (bfloat16*)panels, threads);
    else pack(weights, outputs, inputs, (float*)panels, threads);
}

void strop_unpack(const void* panels, int64_t outputs, int64_t inputs, void* weights, int threads, int half) {
    if (half) unpack((const bfloat16*)panels, outputs, inputs, (bfloat16*)weights, threads);
    else unpack((const float*)panels, outputs, inputs, (float*)weights, threads);
}

void strop_linear(const Matrix* m, const void* x, int64_t rows, void* out, int threads, int half) {
#pragma omp parallel num_threads(threads)
    {
        const Team team{omp_get_thread_num(), omp_get_num_threads()};
        if (half) product<bfloat16>((const bfloat16*)x, rows, &m, 1, (bfloat16*)out, team);
        else product<float>((const float*)x, rows, &m, 1, (float*)out, team);
    }
}

void strop_attend_pages(const void* query, void* keys, void* values, const int32_t* table, const int32_t* lengths, int64_t batch,
                        int64_t width, int64_t heads, int64_t kv_heads, int64_t page, int64_t size, float scale, int64_t window,
                        float softcap, int threads, int half, void* out) {
    const Cache cache{keys, values, page, kv_heads, size};
    const Options options{scale, softcap, window};
    if (half) attend_pages((const bfloat16*)query, cache, table, width, lengths, batch, heads, options, threads, (bfloat16*)out);
    else attend_pages((const float*)query, cache, table, width, lengths, batch, heads, options, threads, (float*)out);
}

void strop_sample(const void* logits, int64_t rows, int64_t count, float temperature, const float* uniforms, int threads, int half,
                  int64_t* tokens, float* logprobs, float* entropies) {
    if (half) sample_rows((const bfloat16*)logits, rows, count, temperature, uniforms, threads, tokens, logprobs, entropies);
    else sample_rows((const float*)logits, rows, count, temperature, uniforms, threads, tokens, logprobs, entropies);
}

}  // extern "C"
