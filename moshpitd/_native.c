/* The passes over memory that every round makes, each as one visit with the interpreter let go.

   One rule: the same bits as the torch code beside it (tensors/codecs), which is what runs where
   this module was not built or the processor lacks AVX2, FMA, F16C or PCLMULQDQ. Operations are written down
   one by one, in the order of that code, and nothing here may be contracted or reassociated
   (-ffp-contract=off); sums that only judge (squared norms) are the exception.

   Addresses come from tensors that the caller holds; nothing of them is kept. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <float.h>
#include <immintrin.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#if !defined(__x86_64__) || !defined(__GNUC__)
#error "written for x86-64 and GNU C; without this module the torch code runs"
#endif

#define V3 __attribute__((target("avx2,fma,f16c")))
#define CLMUL __attribute__((target("pclmul,sse4.1")))
#define WIDE __attribute__((target("avx512f,avx512dq,vpclmulqdq,pclmul,sse4.1")))

/* Values per scale, as HALF_BLOCK in tensors/codecs/half.py: 512 KiB of float32. */
#define HALF_BLOCK 131072

/* From this size on, results go past the caches: nobody reads a residual before the next round. */
#define STREAM_ALIGN 32

static const uint32_t MAGNITUDE = 0x7fffffffu;
static const uint32_t LARGEST_BITS = 0x7f7fffffu;

/* ---- small pieces: a vector of 8, and what is left of a block ---------------------------- */

V3 static inline __m256i lanes(ptrdiff_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

V3 static inline __m256 load(const float *at, ptrdiff_t count)
{
    return count >= 8 ? _mm256_loadu_ps(at) : _mm256_maskload_ps(at, lanes(count));
}

V3 static inline void store(float *at, __m256 values, ptrdiff_t count)
{
    if (count >= 8)
        _mm256_storeu_ps(at, values);
    else
        _mm256_maskstore_ps(at, lanes(count), values);
}

/* Past the caches where the address allows it. */
V3 static inline void put(float *at, __m256 values, ptrdiff_t count, int streams)
{
    if (streams && count >= 8)
        _mm256_stream_ps(at, values);
    else
        store(at, values, count);
}

V3 static inline void store_half(uint16_t *at, __m128i codes, ptrdiff_t count)
{
    if (count >= 8) {
        _mm_storeu_si128((__m128i *)at, codes);
    } else {
        uint16_t all[8];
        _mm_storeu_si128((__m128i *)all, codes);
        memcpy(at, all, (size_t)count * 2);
    }
}

V3 static inline __m128i load_half(const uint16_t *at, ptrdiff_t count)
{
    if (count >= 8)
        return _mm_loadu_si128((const __m128i *)at);
    uint16_t all[8] = {0};
    memcpy(all, at, (size_t)count * 2);
    return _mm_loadu_si128((const __m128i *)all);
}

V3 static inline void store_bytes(int8_t *at, __m256i whole, ptrdiff_t count)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                    _mm256_extracti128_si256(whole, 1));
    __m128i bytes = _mm_packs_epi16(words, words);
    if (count >= 8) {
        _mm_storel_epi64((__m128i *)at, bytes);
    } else {
        int8_t all[16];
        _mm_storeu_si128((__m128i *)all, bytes);
        memcpy(at, all, (size_t)count);
    }
}

V3 static inline __m256i load_bytes(const int8_t *at, ptrdiff_t count)
{
    if (count >= 8)
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
    int8_t all[8] = {0};
    memcpy(all, at, (size_t)count);
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)all));
}

V3 static inline __m256i magnitude(__m256 values)
{
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32((int)MAGNITUDE));
}

V3 static inline uint32_t largest_of(__m256i bits)
{
    uint32_t each[8], most = 0;
    _mm256_storeu_si256((__m256i *)each, bits);
    for (int i = 0; i < 8; i++)
        most = each[i] > most ? each[i] : most;
    return most;
}

V3 static inline double sum_of(__m256 values)
{
    float each[8];
    double sum = 0.0;
    _mm256_storeu_ps(each, values);
    for (int i = 0; i < 8; i++)
        sum += each[i];
    return sum;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- what is said of values before they are used --------------------------------------------- */

/* The squared norm, not finite if a value is not (or if squares are too large for float32, which the
   caller then looks into). Added up in float32 over 64 KiB, in double over all. */
V3 static double squared_norm(const float *values, ptrdiff_t numel)
{
    double squared = 0.0;
    for (ptrdiff_t start = 0; start < numel; start += 16384) {
        ptrdiff_t stop = numel - start < 16384 ? numel : start + 16384, i = start;
        __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
        for (; i + 32 <= stop; i += 32) {
            __m256 one = _mm256_loadu_ps(values + i), two = _mm256_loadu_ps(values + i + 8);
            __m256 three = _mm256_loadu_ps(values + i + 16), four = _mm256_loadu_ps(values + i + 24);
            a = _mm256_fmadd_ps(one, one, a);
            b = _mm256_fmadd_ps(two, two, b);
            c = _mm256_fmadd_ps(three, three, c);
            d = _mm256_fmadd_ps(four, four, d);
        }
        for (; i < stop; i += 8) {
            __m256 one = load(values + i, stop - i);
            a = _mm256_fmadd_ps(one, one, a);
        }
        squared += sum_of(a) + sum_of(b) + sum_of(c) + sum_of(d);
    }
    return squared;
}

/* out = values + added (NULL: values), and what `squared_norm` says of it, in one pass. */
V3 static double sum_into(const float *values, const float *added, float *out, ptrdiff_t numel)
{
    double squared = 0.0;
    for (ptrdiff_t start = 0; start < numel; start += 16384) {
        ptrdiff_t stop = numel - start < 16384 ? numel : start + 16384, i = start;
        __m256 a = _mm256_setzero_ps(), b = a;
        for (; i + 16 <= stop; i += 16) {
            __m256 one = _mm256_loadu_ps(values + i), two = _mm256_loadu_ps(values + i + 8);
            if (added) {
                one = _mm256_add_ps(one, _mm256_loadu_ps(added + i));
                two = _mm256_add_ps(two, _mm256_loadu_ps(added + i + 8));
            }
            _mm256_storeu_ps(out + i, one);
            _mm256_storeu_ps(out + i + 8, two);
            a = _mm256_fmadd_ps(one, one, a);
            b = _mm256_fmadd_ps(two, two, b);
        }
        for (; i < stop; i += 8) {
            __m256 one = load(values + i, stop - i);
            if (added)
                one = _mm256_add_ps(one, load(added + i, stop - i));
            store(out + i, one, stop - i);
            a = _mm256_fmadd_ps(one, one, a);
        }
        squared += sum_of(a) + sum_of(b);
    }
    return squared;
}

/* ---- copies that nobody reads soon ---------------------------------------------------------- */

/* Past the caches: a store that is not streamed first reads what it overwrites. */
V3 static void copy_past(uint8_t *to, const uint8_t *from, size_t count)
{
    size_t odd = (STREAM_ALIGN - (uintptr_t)to % STREAM_ALIGN) % STREAM_ALIGN;
    odd = odd < count ? odd : count;
    memcpy(to, from, odd);
    to += odd, from += odd, count -= odd;
    for (; count >= 128; to += 128, from += 128, count -= 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, count);
    _mm_sfence();
}

/* ---- a contribution into a mean -------------------------------------------------------------- */

/* torch.lerp: from the side of the larger share (tensors/reduction._mix_small). */
typedef struct {
    __m256 coefficient;
    int from_values; /* whether the values are what the difference is added to */
    int reversed;    /* whether the difference is mean - values */
} mixture_t;

V3 static mixture_t mixture(double share, double rest)
{
    mixture_t mix;
    if (share <= 0.5) { /* mean.lerp_(values, share) */
        float weight = (float)share;
        int small = weight < 0.5f;
        mix.coefficient = _mm256_set1_ps(small ? weight : weight - 1.0f);
        mix.from_values = !small;
        mix.reversed = 0;
    } else { /* torch.lerp(values, mean, rest, out=mean) */
        mix.coefficient = _mm256_set1_ps((float)rest);
        mix.from_values = 1;
        mix.reversed = 1;
    }
    return mix;
}

V3 static inline __m256 mixed(const mixture_t *mix, __m256 mean, __m256 values)
{
    __m256 gap = mix->reversed ? _mm256_sub_ps(mean, values) : _mm256_sub_ps(values, mean);
    return _mm256_fmadd_ps(mix->coefficient, gap, mix->from_values ? values : mean);
}

/* ---- float16 with a power of two per block (HalfCodec) ----------------------------------- */

/* c = values + added into `room`, its extremes, and the bits of its largest magnitude. */
V3 static uint32_t half_look(const float *values, const float *added, float *room, ptrdiff_t count,
                             float *low, float *high)
{
    float least = INFINITY, most = -INFINITY;
    __m256 lows = _mm256_set1_ps(INFINITY), highs = _mm256_set1_ps(-INFINITY);
    __m256i bits = _mm256_setzero_si256();
    ptrdiff_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 one = _mm256_loadu_ps(values + i);
        if (added) {
            one = _mm256_add_ps(one, _mm256_loadu_ps(added + i));
            _mm256_storeu_ps(room + i, one);
        }
        lows = _mm256_min_ps(lows, one);
        highs = _mm256_max_ps(highs, one);
        bits = _mm256_max_epu32(bits, magnitude(one));
    }
    uint32_t largest = largest_of(bits);
    for (; i < count; i++) {
        float one = values[i];
        if (added)
            room[i] = one = one + added[i];
        uint32_t own;
        memcpy(&own, &one, sizeof own);
        own &= MAGNITUDE;
        largest = own > largest ? own : largest;
        least = one < least ? one : least;
        most = one > most ? one : most;
    }
    float each[8];
    _mm256_storeu_ps(each, lows);
    for (int k = 0; k < 8; k++)
        least = each[k] < least ? each[k] : least;
    _mm256_storeu_ps(each, highs);
    for (int k = 0; k < 8; k++)
        most = each[k] > most ? each[k] : most;
    *low = least;
    *high = most;
    return largest;
}

/* The power of two that brings `absmax` into [2^14, 2^15), as a divisor. */
static float half_scale(float absmax)
{
    int exponent;
    if (absmax == 0.0f)
        return 1.0f;
    frexpf(absmax, &exponent);
    exponent -= 15;
    return ldexpf(1.0f, exponent > -126 ? exponent : -126);
}

V3 static float half_block(const float *c, float *left, float *decoded, uint16_t *codes,
                           ptrdiff_t count, float low, float high)
{
    float absmax = -low > high ? -low : high;
    int constant = low == high && absmax > 0.0f;
    float scale = constant ? low : half_scale(absmax);
    int plain = scale == 1.0f && absmax < FLT_MAX / 2;
    int clamps = absmax >= FLT_MAX / 2;
    int streams = ((uintptr_t)left % STREAM_ALIGN) == 0;
    __m256 inverse = _mm256_set1_ps((float)(1.0 / (double)scale));
    __m256 factor = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
    __m256 top = _mm256_set1_ps(32768.0f - 16.0f), bottom = _mm256_set1_ps(-32768.0f + 16.0f);
    __m256 one = _mm256_set1_ps(1.0f);
    for (ptrdiff_t i = 0; i < count; i += 8) {
        ptrdiff_t here = count - i;
        __m256 piece = load(c + i, here), scaled = piece;
        if (constant) {
            scaled = one;
        } else if (!plain) {
            scaled = _mm256_mul_ps(piece, inverse);
            if (clamps)
                scaled = _mm256_min_ps(_mm256_max_ps(scaled, bottom), top);
        }
        __m128i code = _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store_half(codes + i, code, here);
        if (!left)
            continue;
        __m256 rest = _mm256_cvtph_ps(code);
        if (decoded) {
            __m256 told = scale == 1.0f ? rest : _mm256_mul_ps(rest, factor);
            store(decoded + i, told, here);
            put(left + i, _mm256_sub_ps(piece, told), here, streams);
        } else {
            put(left + i, _mm256_fmadd_ps(rest, minus, piece), here, streams);
        }
    }
    return scale;
}

/* A whole block in one visit, if `scale` turns out to be its scale: 1, and all is written. 0: what
   was written is worth nothing, and the block has to be looked at first. */
V3 static int half_guessed(const float *values, const float *added, float *left, float *decoded,
                           uint16_t *codes, ptrdiff_t count, float scale)
{
    int streams = ((uintptr_t)left % STREAM_ALIGN) == 0;
    int unscaled = scale == 1.0f;
    __m256 inverse = _mm256_set1_ps((float)(1.0 / (double)scale));
    __m256 factor = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
    __m256 first = _mm256_set1_ps(added ? values[0] + added[0] : values[0]);
    __m256 differs = _mm256_setzero_ps();
    __m256i bits = _mm256_setzero_si256();
    if (count % 8)
        return 0;
    for (ptrdiff_t i = 0; i < count; i += 8) {
        __m256 piece = _mm256_loadu_ps(values + i);
        if (added)
            piece = _mm256_add_ps(piece, _mm256_loadu_ps(added + i));
        bits = _mm256_max_epu32(bits, magnitude(piece));
        differs = _mm256_or_ps(differs, _mm256_cmp_ps(piece, first, _CMP_NEQ_UQ));
        __m256 scaled = unscaled ? piece : _mm256_mul_ps(piece, inverse);
        __m128i code = _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(codes + i), code);
        if (!left)
            continue;
        __m256 rest = _mm256_cvtph_ps(code);
        if (decoded) {
            __m256 told = unscaled ? rest : _mm256_mul_ps(rest, factor);
            _mm256_storeu_ps(decoded + i, told);
            put(left + i, _mm256_sub_ps(piece, told), 8, streams);
        } else {
            put(left + i, _mm256_fmadd_ps(rest, minus, piece), 8, streams);
        }
    }
    float absmax = float_of(largest_of(bits));
    /* Not of NaN and infinity, nor of what has to be clamped; and a block of one value has a scale
       of its own. */
    return absmax < FLT_MAX / 2 && half_scale(absmax) == scale && _mm256_movemask_ps(differs) != 0;
}

/* Of the block that this thread encoded last, and whether the one before it had the same: then the
   next most often has it too, and is done in one visit. What comes out does not depend on it. */
static _Thread_local float last_scale = 0.0f;
static _Thread_local int alike = 0;

/* 0, or 1 where a value is not finite. */
V3 static int half_encode(const float *values, const float *added, float *left, float *decoded,
                          uint8_t *payload, float *room, ptrdiff_t numel)
{
    ptrdiff_t blocks = (numel + HALF_BLOCK - 1) / HALF_BLOCK;
    uint16_t *codes = (uint16_t *)(payload + blocks * 4);
    /* Who writes over what is read cannot read it again after a wrong guess. */
    int over = (left && (left == values || left == added)) ||
               (decoded && (decoded == values || decoded == added));
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * HALF_BLOCK;
        ptrdiff_t count = numel - start < HALF_BLOCK ? numel - start : HALF_BLOCK;
        const float *more = added ? added + start : NULL;
        float *rest = left ? left + start : NULL, *told = decoded ? decoded + start : NULL;
        float low, high, scale = last_scale;
        if (over || !alike ||
            !half_guessed(values + start, more, rest, told, codes + start, count, scale)) {
            uint32_t largest = half_look(values + start, more, room, count, &low, &high);
            if (largest > LARGEST_BITS)
                return 1;
            alike = half_scale(float_of(largest)) == last_scale;
            last_scale = half_scale(float_of(largest));
            scale = half_block(added ? room : values + start, rest, told, codes + start, count,
                               low, high);
        }
        memcpy(payload + block * 4, &scale, sizeof scale);
    }
    _mm_sfence();
    return 0;
}

/* Whether all scales in front of a payload are finite. */
static int sound(const uint8_t *payload, ptrdiff_t blocks)
{
    for (ptrdiff_t block = 0; block < blocks; block++) {
        float scale;
        memcpy(&scale, payload + block * 4, sizeof scale);
        if (!isfinite(scale))
            return 0;
    }
    return 1;
}

static inline float scale_of(const uint8_t *payload, ptrdiff_t block)
{
    float scale;
    memcpy(&scale, payload + block * 4, sizeof scale);
    return scale;
}

V3 static inline __m256 half_values(const uint16_t *codes, ptrdiff_t here, float scale,
                                    __m256 factor)
{
    __m256 values = _mm256_cvtph_ps(load_half(codes, here));
    return scale == 1.0f ? values : _mm256_mul_ps(values, factor);
}

/* The squared norm, not finite if any value is not; -1 where a scale is not finite. `out` may be
   NULL: then nothing is kept, and the norm is the same. With `past` it goes past the caches. */
V3 static double half_decode(const uint8_t *payload, float *out, ptrdiff_t numel, int past)
{
    ptrdiff_t blocks = (numel + HALF_BLOCK - 1) / HALF_BLOCK;
    const uint16_t *codes = (const uint16_t *)(payload + blocks * 4);
    int streams = past && ((uintptr_t)out % STREAM_ALIGN) == 0;
    double squared = 0.0;
    if (!sound(payload, blocks))
        return -1.0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * HALF_BLOCK, i = start;
        ptrdiff_t stop = numel - start < HALF_BLOCK ? numel : start + HALF_BLOCK;
        float scale = scale_of(payload, block);
        __m256 factor = _mm256_set1_ps(scale);
        __m256 sums = _mm256_setzero_ps(), more = _mm256_setzero_ps();
        for (; i + 16 <= stop; i += 16) {
            __m256 a = half_values(codes + i, 8, scale, factor);
            __m256 b = half_values(codes + i + 8, 8, scale, factor);
            if (out) {
                put(out + i, a, 8, streams);
                put(out + i + 8, b, 8, streams);
            }
            sums = _mm256_fmadd_ps(a, a, sums);
            more = _mm256_fmadd_ps(b, b, more);
        }
        for (; i < stop; i += 8) {
            __m256 a = half_values(codes + i, stop - i, scale, factor);
            if (out)
                store(out + i, a, stop - i);
            sums = _mm256_fmadd_ps(a, a, sums);
        }
        squared += sum_of(sums) + sum_of(more);
    }
    if (streams)
        _mm_sfence();
    return squared;
}

/* At least the squared norm of all values; infinite if a value is not finite, -1 where a scale is not.
   Four times as fast: most payloads are so far below any limit that this is enough. */
V3 static double half_bound(const uint8_t *payload, ptrdiff_t numel)
{
    ptrdiff_t blocks = (numel + HALF_BLOCK - 1) / HALF_BLOCK;
    const uint16_t *codes = (const uint16_t *)(payload + blocks * 4);
    __m256i unsigned_bits = _mm256_set1_epi16(0x7fff);
    double bound = 0.0;
    if (!sound(payload, blocks))
        return -1.0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * HALF_BLOCK, i = start;
        ptrdiff_t stop = numel - start < HALF_BLOCK ? numel : start + HALF_BLOCK;
        __m256i a = _mm256_setzero_si256(), b = a;
        for (; i + 32 <= stop; i += 32) {
            __m256i one = _mm256_loadu_si256((const __m256i *)(codes + i));
            __m256i two = _mm256_loadu_si256((const __m256i *)(codes + i + 16));
            a = _mm256_max_epu16(a, _mm256_and_si256(one, unsigned_bits));
            b = _mm256_max_epu16(b, _mm256_and_si256(two, unsigned_bits));
        }
        uint16_t each[16], most = 0;
        _mm256_storeu_si256((__m256i *)each, _mm256_max_epu16(a, b));
        for (int k = 0; k < 16; k++)
            most = each[k] > most ? each[k] : most;
        for (; i < stop; i++)
            most = (codes[i] & 0x7fff) > most ? codes[i] & 0x7fff : most;
        if (most >= 0x7c00) /* an infinity or NaN of 16 bits */
            return INFINITY;
        double largest = (double)_cvtsh_ss(most) * (double)scale_of(payload, block);
        bound += (double)(stop - start) * largest * largest;
    }
    return bound;
}

V3 static void half_mix(const uint8_t *payload, float *mean, ptrdiff_t numel, double share,
                        double rest)
{
    ptrdiff_t blocks = (numel + HALF_BLOCK - 1) / HALF_BLOCK;
    const uint16_t *codes = (const uint16_t *)(payload + blocks * 4);
    mixture_t mix = mixture(share, rest);
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * HALF_BLOCK, i = start;
        ptrdiff_t stop = numel - start < HALF_BLOCK ? numel : start + HALF_BLOCK;
        float scale = scale_of(payload, block);
        __m256 factor = _mm256_set1_ps(scale);
        for (; i < stop; i += 8) {
            __m256 values = half_values(codes + i, stop - i, scale, factor);
            store(mean + i, mixed(&mix, load(mean + i, stop - i), values), stop - i);
        }
    }
}

/* ---- int8 with the largest magnitude per block (AbsmaxCodec with 8 bits) ------------------ */

V3 static int absmax_encode(const float *values, const float *added, float *left, float *decoded,
                            uint8_t *payload, float *room, ptrdiff_t numel, ptrdiff_t width)
{
    ptrdiff_t blocks = (numel + width - 1) / width;
    int8_t *codes = (int8_t *)(payload + blocks * 4);
    int streams = ((uintptr_t)left % STREAM_ALIGN) == 0 && width % 8 == 0;
    __m256 top = _mm256_set1_ps(127.0f), inverse = _mm256_set1_ps((float)(1.0 / 127.0));
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * width;
        ptrdiff_t count = numel - start < width ? numel - start : width;
        const float *c = values + start;
        __m256i bits = _mm256_setzero_si256();
        for (ptrdiff_t i = 0; i < count; i += 8) {
            __m256 one = load(values + start + i, count - i);
            if (added) {
                one = _mm256_add_ps(one, load(added + start + i, count - i));
                store(room + i, one, count - i);
            }
            bits = _mm256_max_epu32(bits, magnitude(one));
        }
        if (added)
            c = room;
        uint32_t largest = largest_of(bits);
        if (largest > LARGEST_BITS)
            return 1;
        float absmax = largest == 0 ? 1.0f : float_of(largest);
        memcpy(payload + block * 4, &absmax, sizeof absmax);
        __m256 each = _mm256_set1_ps(absmax);
        for (ptrdiff_t i = 0; i < count; i += 8) {
            ptrdiff_t here = count - i;
            __m256 piece = load(c + i, here);
            __m256 scaled = _mm256_mul_ps(_mm256_div_ps(piece, each), top);
            scaled = _mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            __m256i code = _mm256_cvtps_epi32(scaled);
            store_bytes(codes + start + i, code, here);
            if (!left)
                continue;
            scaled = _mm256_mul_ps(_mm256_mul_ps(scaled, inverse), each);
            put(left + start + i, _mm256_sub_ps(piece, scaled), here, streams);
            if (decoded) {
                /* From the code, which has no sign where it is 0. */
                __m256 told = _mm256_mul_ps(_mm256_cvtepi32_ps(code), inverse);
                store(decoded + start + i, _mm256_mul_ps(told, each), here);
            }
        }
    }
    _mm_sfence();
    return 0;
}

V3 static inline __m256 absmax_values(const int8_t *codes, ptrdiff_t here, __m256 each)
{
    __m256 inverse = _mm256_set1_ps((float)(1.0 / 127.0));
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(load_bytes(codes, here)), inverse), each);
}

/* As half_decode. */
V3 static double absmax_decode(const uint8_t *payload, float *out, ptrdiff_t numel, ptrdiff_t width,
                               int past)
{
    ptrdiff_t blocks = (numel + width - 1) / width;
    const int8_t *codes = (const int8_t *)(payload + blocks * 4);
    int streams = past && ((uintptr_t)out % STREAM_ALIGN) == 0 && width % 8 == 0;
    double squared = 0.0;
    if (!sound(payload, blocks))
        return -1.0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * width;
        ptrdiff_t stop = numel - start < width ? numel : start + width;
        __m256 each = _mm256_set1_ps(scale_of(payload, block)), sums = _mm256_setzero_ps();
        for (ptrdiff_t i = start; i < stop; i += 8) {
            __m256 one = absmax_values(codes + i, stop - i, each);
            if (out)
                put(out + i, one, stop - i, streams);
            sums = _mm256_fmadd_ps(one, one, sums);
        }
        squared += sum_of(sums);
    }
    if (streams)
        _mm_sfence();
    return squared;
}

/* As half_bound: no code is above 128, so they need not be looked at. */
static double absmax_bound(const uint8_t *payload, ptrdiff_t numel, ptrdiff_t width)
{
    ptrdiff_t blocks = (numel + width - 1) / width;
    double bound = 0.0;
    if (!sound(payload, blocks))
        return -1.0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        double largest = (double)scale_of(payload, block) * (128.0 / 127.0) * (1.0 + 1e-6);
        if (fabs(largest) > FLT_MAX)
            return INFINITY;
        bound += (double)width * largest * largest;
    }
    return bound;
}

V3 static void absmax_mix(const uint8_t *payload, float *mean, ptrdiff_t numel, ptrdiff_t width,
                          double share, double rest)
{
    ptrdiff_t blocks = (numel + width - 1) / width;
    const int8_t *codes = (const int8_t *)(payload + blocks * 4);
    mixture_t mix = mixture(share, rest);
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t start = block * width;
        ptrdiff_t stop = numel - start < width ? numel : start + width;
        __m256 each = _mm256_set1_ps(scale_of(payload, block));
        for (ptrdiff_t i = start; i < stop; i += 8) {
            __m256 values = absmax_values(codes + i, stop - i, each);
            store(mean + i, mixed(&mix, load(mean + i, stop - i), values), stop - i);
        }
    }
}

/* ---- crc32, the one of zlib --------------------------------------------------------------- */

/* The remainder of a message is that of any other that is congruent to it modulo the polynomial
   0x04c11db7. So 64 bytes are carried over the next 64 by multiplying their halves with x^(512 + 64)
   and x^512 modulo it (bit-reflected, hence the odd shifts), until 16 bytes are left, which a table
   takes one by one. The constants are checked against zlib by the test of every length up to 300
   and of some beyond. */

static uint32_t TABLE[256];

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? (value >> 1) ^ 0xedb88320u : value >> 1;
        TABLE[i] = value;
    }
}

static uint32_t crc_bytes(uint32_t state, const uint8_t *at, size_t count)
{
    for (size_t i = 0; i < count; i++)
        state = (state >> 8) ^ TABLE[(state ^ at[i]) & 0xff];
    return state;
}

CLMUL static inline __m128i carried(__m128i sum, __m128i over, __m128i next)
{
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(sum, over, 0x00),
                                             _mm_clmulepi64_si128(sum, over, 0x11)));
}

/* `sum` stands for all before `at`: up to the end, and down to 32 bits. */
CLMUL static uint32_t crc_rest(__m128i sum, const uint8_t *at, size_t count)
{
    const __m128i over_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    for (; count >= 16; at += 16, count -= 16)
        sum = carried(sum, over_16, _mm_loadu_si128((const __m128i *)at));
    uint8_t left[16];
    _mm_storeu_si128((__m128i *)left, sum);
    return crc_bytes(crc_bytes(0, left, sizeof left), at, count);
}

CLMUL static uint32_t crc_folded(uint32_t state, const uint8_t *at, size_t count)
{
    if (count < 64)
        return crc_bytes(state, at, count);
    const __m128i *block = (const __m128i *)at;
    const __m128i over_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i over_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i a = _mm_xor_si128(_mm_loadu_si128(block), _mm_cvtsi32_si128((int)state));
    __m128i b = _mm_loadu_si128(block + 1);
    __m128i c = _mm_loadu_si128(block + 2);
    __m128i d = _mm_loadu_si128(block + 3);
    for (block += 4, count -= 64; count >= 64; block += 4, count -= 64) {
        a = carried(a, over_64, _mm_loadu_si128(block));
        b = carried(b, over_64, _mm_loadu_si128(block + 1));
        c = carried(c, over_64, _mm_loadu_si128(block + 2));
        d = carried(d, over_64, _mm_loadu_si128(block + 3));
    }
    a = carried(carried(carried(a, over_16, b), over_16, c), over_16, d);
    return crc_rest(a, (const uint8_t *)block, count);
}

/* The same over 256 bytes, four products at a time: 63 GB/s of what a cache holds, where the above
   does 16. Only where the processor has AVX-512 and VPCLMULQDQ. */
static int has_wide;

WIDE static inline __m512i carried_wide(__m512i sum, __m512i over, __m512i next)
{
    return _mm512_ternarylogic_epi64(next, _mm512_clmulepi64_epi128(sum, over, 0x00),
                                     _mm512_clmulepi64_epi128(sum, over, 0x11), 0x96);
}

WIDE static uint32_t crc_wide(uint32_t state, const uint8_t *at, size_t count)
{
    const __m512i over_256 = _mm512_broadcast_i64x2(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i over_64 = _mm512_broadcast_i64x2(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    const __m128i over_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m512i a = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)), b, c, d;
    a = _mm512_xor_si512(_mm512_loadu_si512(at), a);
    b = _mm512_loadu_si512(at + 64);
    c = _mm512_loadu_si512(at + 128);
    d = _mm512_loadu_si512(at + 192);
    for (at += 256, count -= 256; count >= 256; at += 256, count -= 256) {
        a = carried_wide(a, over_256, _mm512_loadu_si512(at));
        b = carried_wide(b, over_256, _mm512_loadu_si512(at + 64));
        c = carried_wide(c, over_256, _mm512_loadu_si512(at + 128));
        d = carried_wide(d, over_256, _mm512_loadu_si512(at + 192));
    }
    a = carried_wide(carried_wide(carried_wide(a, over_64, b), over_64, c), over_64, d);
    __m128i sum = _mm512_extracti64x2_epi64(a, 0);
    sum = carried(sum, over_16, _mm512_extracti64x2_epi64(a, 1));
    sum = carried(sum, over_16, _mm512_extracti64x2_epi64(a, 2));
    sum = carried(sum, over_16, _mm512_extracti64x2_epi64(a, 3));
    return crc_rest(sum, at, count);
}

static uint32_t crc_of(const uint8_t *at, size_t count)
{
    uint32_t begin = ~(uint32_t)0;
    return ~(has_wide && count >= 256 ? crc_wide(begin, at, count) : crc_folded(begin, at, count));
}

/* ---- records of TLS ------------------------------------------------------------------------ */

/* OpenSSL gives at most a record of 16 KiB per call. Asked from Python, a part of 512 KiB is 32 calls
   with a wait for the interpreter after each; here it is one. This module is not linked to any
   OpenSSL: who calls says where the functions of the one that made `ssl` are. */
typedef int (*ssl_read_t)(void *ssl, void *to, int count);
typedef int (*ssl_get_error_t)(const void *ssl, int result);

static ptrdiff_t records(ssl_read_t read, ssl_get_error_t get_error, void *ssl, uint8_t *to,
                         ptrdiff_t wanted, int *error)
{
    ptrdiff_t got = 0;
    *error = 0;
    while (got < wanted) {
        ptrdiff_t rest = wanted - got;
        int count = read(ssl, to + got, rest < INT_MAX ? (int)rest : INT_MAX);
        if (count <= 0) {
            *error = get_error(ssl, count);
            break;
        }
        got += count;
    }
    return got;
}

/* ---- bytes of a connection ------------------------------------------------------------------- */

/* A segment from the kernel to its place, or the other way, without the interpreter in between: asked
   from Python, each of the three to eight pieces in which the kernel gives it costs three waits for
   the interpreter. All waits are for the kernel and have no bound: who shuts the socket ends them. */

enum { FULL = 0, ENDED = 1, REFUSED = 2, FAILED = 3 };
/* FULL: all was done. ENDED: the stream did. REFUSED: OpenSSL says why (SSL_get_error).
   FAILED: the kernel says why (errno). */

/* Looked at by other threads while a segment is on its way: what is heard is a sign of life. */
static void counted(uint64_t *count, ptrdiff_t more)
{
    __atomic_fetch_add(count, (uint64_t)more, __ATOMIC_RELAXED);
}

static ptrdiff_t received(int descriptor, uint8_t *to, ptrdiff_t most, uint64_t *heard)
{
    ssize_t count;
    do
        count = recv(descriptor, to, (size_t)most, 0);
    while (count < 0 && errno == EINTR);
    if (count > 0)
        counted(heard, count);
    return count;
}

/* `wanted` bytes, however long that takes; fewer only where the stream ended or failed. */
static ptrdiff_t filled(int descriptor, uint8_t *to, ptrdiff_t wanted, uint64_t *heard, int *how,
                        int *why)
{
    ptrdiff_t got = 0;
    *how = FULL;
    *why = 0;
    while (got < wanted) {
        ptrdiff_t count = received(descriptor, to + got, wanted - got, heard);
        if (count <= 0) {
            *how = count == 0 ? ENDED : FAILED;
            *why = count == 0 ? 0 : errno;
            break;
        }
        got += count;
    }
    return got;
}

/* 0, or why the kernel did not take all. */
static int sent(int descriptor, struct iovec *pieces, int count, uint64_t *handed)
{
    while (count > 0) {
        struct msghdr message = {0};
        message.msg_iov = pieces;
        message.msg_iovlen = (size_t)count;
        ssize_t taken = sendmsg(descriptor, &message, MSG_NOSIGNAL);
        if (taken < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        counted(handed, taken);
        while (count > 0 && (size_t)taken >= pieces->iov_len) {
            taken -= (ssize_t)pieces->iov_len;
            pieces++;
            count--;
        }
        if (count > 0) {
            pieces->iov_base = (uint8_t *)pieces->iov_base + taken;
            pieces->iov_len -= (size_t)taken;
        }
    }
    return 0;
}

typedef struct {
    void *ssl, *incoming, *outgoing;
    ssl_read_t ssl_read;
    int (*ssl_write)(void *ssl, const void *from, int count);
    ssl_get_error_t ssl_get_error;
    int (*bio_read)(void *bio, void *to, int count);
    int (*bio_write)(void *bio, const void *from, int count);
    void (*clear_error)(void);
    /* Held whenever ssl or one of its two memories is touched, never during a call to the kernel.
       After REFUSED the caller holds it: once OpenSSL refuses one direction it refuses the other,
       without a word, and whoever is next shall find written down what this one heard. */
    pthread_mutex_t lock;
} conversation_t;

/* What OpenSSL and its memory carry at a time: one piece of this size stays in the cache. */
#define SEALED_PIECE 65536
static const int WANTS_TO_READ = 2; /* SSL_ERROR_WANT_READ, since 1998 */

static ptrdiff_t tls_received(conversation_t *with, int descriptor, uint8_t *to, ptrdiff_t wanted,
                              uint8_t *room, ptrdiff_t room_bytes, uint64_t *heard, int *how,
                              int *why)
{
    ptrdiff_t got = 0;
    *how = FULL;
    *why = 0;
    pthread_mutex_lock(&with->lock);
    for (;;) {
        with->clear_error(); /* this thread's; what others left there would be taken for ours */
        got += records(with->ssl_read, with->ssl_get_error, with->ssl, to + got, wanted - got, why);
        if (got == wanted)
            break;
        if (*why != WANTS_TO_READ) {
            *how = REFUSED;
            return got;
        }
        pthread_mutex_unlock(&with->lock);
        ptrdiff_t count = received(descriptor, room, room_bytes, heard);
        int error = errno;
        if (count <= 0) {
            *how = count == 0 ? ENDED : FAILED;
            *why = count == 0 ? 0 : error;
            return got;
        }
        pthread_mutex_lock(&with->lock);
        if (with->bio_write(with->incoming, room, (int)count) != count) {
            *how = FAILED;
            *why = ENOMEM;
            break;
        }
    }
    pthread_mutex_unlock(&with->lock);
    return got;
}

/* All that lies sealed in memory goes to `room` and, where that is full, on to the kernel. */
static int tls_sent(conversation_t *with, int descriptor, const struct iovec *pieces, int count,
                    uint8_t *room, ptrdiff_t room_bytes, uint64_t *handed, int *why)
{
    ptrdiff_t held = 0;
    *why = 0;
    for (int piece = 0; piece < count; piece++) {
        const uint8_t *from = pieces[piece].iov_base;
        size_t left = pieces[piece].iov_len;
        while (left > 0) {
            int part = left < SEALED_PIECE ? (int)left : SEALED_PIECE, taken, more;
            pthread_mutex_lock(&with->lock);
            with->clear_error();
            taken = with->ssl_write(with->ssl, from, part);
            if (taken <= 0) {
                *why = with->ssl_get_error(with->ssl, taken);
                return REFUSED;
            }
            from += taken;
            left -= (size_t)taken;
            for (;;) {
                more = with->bio_read(with->outgoing, room + held, (int)(room_bytes - held));
                if (more > 0)
                    held += more;
                if (more <= 0 || held < room_bytes)
                    break;
                pthread_mutex_unlock(&with->lock);
                struct iovec full = {room, (size_t)held};
                if ((*why = sent(descriptor, &full, 1, handed)) != 0)
                    return FAILED;
                held = 0;
                pthread_mutex_lock(&with->lock);
            }
            pthread_mutex_unlock(&with->lock);
        }
    }
    if (held > 0) {
        struct iovec rest = {room, (size_t)held};
        if ((*why = sent(descriptor, &rest, 1, handed)) != 0)
            return FAILED;
    }
    return FULL;
}

/* ---- payloads by segments ------------------------------------------------------------------ */

/* Before every segment of a payload but the first stands one byte (net/frames.py). A part's segments
   are one call each way: asked from Python they were a wait for the interpreter each, and one more
   for the byte between two. Whoever sends looks at `urgent` between two segments, as Python did. */
static const uint8_t MORE = 0;

/* A connection of either kind: `with` is NULL where nothing is sealed. */
typedef struct {
    conversation_t *with;
    int descriptor;
    Py_buffer room;
    uint64_t *count; /* of bytes heard, or handed over */
} line_t;

static ptrdiff_t line_received(line_t *line, uint8_t *to, ptrdiff_t wanted, int *how, int *why)
{
    ptrdiff_t room_bytes = line->room.len < INT_MAX ? line->room.len : INT_MAX;
    if (line->with == NULL)
        return filled(line->descriptor, to, wanted, line->count, how, why);
    return tls_received(line->with, line->descriptor, to, wanted, line->room.buf, room_bytes,
                        line->count, how, why);
}

/* Returns up to where the payload is here. `mark`: -1, or the byte, not MORE, that stands where a
   segment was to follow. */
static ptrdiff_t segments_received(line_t *line, uint8_t *to, ptrdiff_t got, ptrdiff_t wanted,
                                   ptrdiff_t segment, int *mark, int *how, int *why)
{
    *mark = -1;
    *how = FULL;
    *why = 0;
    while (got < wanted) {
        uint8_t byte = MORE;
        if (got > 0) {
            if (line_received(line, &byte, 1, how, why) == 0)
                break;
            if (byte != MORE) {
                *mark = byte;
                break;
            }
        }
        ptrdiff_t here = wanted - got < segment ? wanted - got : segment;
        got += line_received(line, to + got, here, how, why);
        if (*how != FULL)
            break;
    }
    return got;
}

/* `head` and the segment that begins at `start`, then the others, each after its byte, until one is
   urgent. Returns up to where the payload is handed over. */
static ptrdiff_t segments_sent(line_t *line, Py_buffer *head, const Py_buffer *body,
                               ptrdiff_t start, ptrdiff_t segment, const uint8_t *urgent, int *how,
                               int *why)
{
    struct iovec first = {head->buf, (size_t)head->len};
    ptrdiff_t room_bytes = line->room.len < INT_MAX ? line->room.len : INT_MAX;
    *how = FULL;
    do {
        ptrdiff_t here = body->len - start < segment ? body->len - start : segment;
        struct iovec pieces[2] = {first, {(uint8_t *)body->buf + start, (size_t)here}};
        if (line->with == NULL) {
            *why = sent(line->descriptor, pieces, 2, line->count);
            *how = *why == 0 ? FULL : FAILED;
        } else {
            *how = tls_sent(line->with, line->descriptor, pieces, 2, line->room.buf, room_bytes,
                            line->count, why);
        }
        if (*how != FULL)
            return start;
        start += here;
        first.iov_base = (void *)&MORE;
        first.iov_len = 1;
    } while (start < body->len && !__atomic_load_n(urgent, __ATOMIC_RELAXED));
    return start;
}

/* ---- what Python sees -------------------------------------------------------------------- */

#define AT(type, number) ((type *)(uintptr_t)(number))

static PyObject *py_squared_norm(PyObject *module, PyObject *args)
{
    unsigned long long values;
    Py_ssize_t numel;
    double squared;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kn", &values, &numel))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    squared = squared_norm(AT(const float, values), numel);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(squared);
}

static PyObject *py_copy_past(PyObject *module, PyObject *args)
{
    unsigned long long to, from;
    Py_ssize_t count;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKn", &to, &from, &count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy_past(AT(uint8_t, to), AT(const uint8_t, from), (size_t)count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_half_encode(PyObject *module, PyObject *args)
{
    unsigned long long values, added, left, decoded, payload, room;
    Py_ssize_t numel;
    int bad;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKn", &values, &added, &left, &decoded, &payload, &room,
                          &numel))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bad = half_encode(AT(const float, values), AT(const float, added), AT(float, left),
                      AT(float, decoded), AT(uint8_t, payload), AT(float, room), numel);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!bad);
}

static PyObject *py_half_decode(PyObject *module, PyObject *args)
{
    unsigned long long payload, out;
    Py_ssize_t numel;
    int past;
    double squared;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKnp", &payload, &out, &numel, &past))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    squared = half_decode(AT(const uint8_t, payload), AT(float, out), numel, past);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(squared);
}

static PyObject *py_half_bound(PyObject *module, PyObject *args)
{
    unsigned long long payload;
    Py_ssize_t numel;
    double bound;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kn", &payload, &numel))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bound = half_bound(AT(const uint8_t, payload), numel);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(bound);
}

static PyObject *py_half_mix(PyObject *module, PyObject *args)
{
    unsigned long long payload, mean;
    Py_ssize_t numel;
    double share, rest;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKndd", &payload, &mean, &numel, &share, &rest))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    half_mix(AT(const uint8_t, payload), AT(float, mean), numel, share, rest);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_absmax_encode(PyObject *module, PyObject *args)
{
    unsigned long long values, added, left, decoded, payload, room;
    Py_ssize_t numel, width;
    int bad;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKnn", &values, &added, &left, &decoded, &payload, &room,
                          &numel, &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bad = absmax_encode(AT(const float, values), AT(const float, added), AT(float, left),
                        AT(float, decoded), AT(uint8_t, payload), AT(float, room), numel, width);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!bad);
}

static PyObject *py_absmax_decode(PyObject *module, PyObject *args)
{
    unsigned long long payload, out;
    Py_ssize_t numel, width;
    int past;
    double squared;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKnnp", &payload, &out, &numel, &width, &past))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    squared = absmax_decode(AT(const uint8_t, payload), AT(float, out), numel, width, past);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(squared);
}

static PyObject *py_absmax_bound(PyObject *module, PyObject *args)
{
    unsigned long long payload;
    Py_ssize_t numel, width;
    double bound;
    (void)module;
    if (!PyArg_ParseTuple(args, "Knn", &payload, &numel, &width))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bound = absmax_bound(AT(const uint8_t, payload), numel, width);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(bound);
}

static PyObject *py_absmax_mix(PyObject *module, PyObject *args)
{
    unsigned long long payload, mean;
    Py_ssize_t numel, width;
    double share, rest;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKnndd", &payload, &mean, &numel, &width, &share, &rest))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    absmax_mix(AT(const uint8_t, payload), AT(float, mean), numel, width, share, rest);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_sum_into(PyObject *module, PyObject *args)
{
    unsigned long long values, added, out;
    Py_ssize_t numel;
    double squared;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKn", &values, &added, &out, &numel))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    squared = sum_into(AT(const float, values), AT(const float, added), AT(float, out), numel);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(squared);
}

static PyObject *py_crc32(PyObject *module, PyObject *args)
{
    Py_buffer payload;
    uint32_t crc;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*", &payload))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc_of((const uint8_t *)payload.buf, (size_t)payload.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&payload);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_tls_read(PyObject *module, PyObject *args)
{
    unsigned long long read, get_error, ssl, to;
    Py_ssize_t wanted, got;
    int error;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKn", &read, &get_error, &ssl, &to, &wanted))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    got = records((ssl_read_t)(uintptr_t)read, (ssl_get_error_t)(uintptr_t)get_error,
                  AT(void, ssl), AT(uint8_t, to), wanted, &error);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(ni)", got, error);
}

/* Buffers of one call, with their lengths, so that nothing is written beyond an end. */
static int as_count(Py_buffer *buffer)
{
    if (buffer->len == (Py_ssize_t)sizeof(uint64_t) && (uintptr_t)buffer->buf % 8 == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a count is 8 aligned bytes");
    return 0;
}

static int as_room(Py_buffer *buffer)
{
    if (buffer->len > 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a room of no bytes");
    return 0;
}

#define CONVERSATION "moshpitd._native.conversation"

static void conversation_over(PyObject *capsule)
{
    conversation_t *with = PyCapsule_GetPointer(capsule, CONVERSATION);
    if (with != NULL) {
        pthread_mutex_destroy(&with->lock);
        free(with);
    }
}

static PyObject *py_conversation(PyObject *module, PyObject *args)
{
    unsigned long long at[9];
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKKKK", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6,
                          at + 7, at + 8))
        return NULL;
    for (int i = 0; i < 9; i++) {
        if (at[i] == 0) {
            PyErr_SetString(PyExc_ValueError, "a conversation needs nine addresses");
            return NULL;
        }
    }
    conversation_t *with = calloc(1, sizeof *with);
    if (with == NULL)
        return PyErr_NoMemory();
    with->ssl = AT(void, at[0]);
    with->incoming = AT(void, at[1]);
    with->outgoing = AT(void, at[2]);
    with->ssl_read = (ssl_read_t)(uintptr_t)at[3];
    with->ssl_write = (int (*)(void *, const void *, int))(uintptr_t)at[4];
    with->ssl_get_error = (ssl_get_error_t)(uintptr_t)at[5];
    with->bio_read = (int (*)(void *, void *, int))(uintptr_t)at[6];
    with->bio_write = (int (*)(void *, const void *, int))(uintptr_t)at[7];
    with->clear_error = (void (*)(void))(uintptr_t)at[8];
    pthread_mutex_init(&with->lock, NULL);
    PyObject *capsule = PyCapsule_New(with, CONVERSATION, conversation_over);
    if (capsule == NULL) {
        pthread_mutex_destroy(&with->lock);
        free(with);
    }
    return capsule;
}

static PyObject *py_lock(PyObject *module, PyObject *capsule)
{
    conversation_t *with = PyCapsule_GetPointer(capsule, CONVERSATION);
    (void)module;
    if (with == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&with->lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_unlock(PyObject *module, PyObject *capsule)
{
    conversation_t *with = PyCapsule_GetPointer(capsule, CONVERSATION);
    (void)module;
    if (with == NULL)
        return NULL;
    pthread_mutex_unlock(&with->lock);
    Py_RETURN_NONE;
}

/* The conversation of a line: None, or its capsule. */
static int as_line(PyObject *capsule, line_t *line)
{
    line->with = NULL;
    if (capsule == Py_None)
        return 1;
    line->with = PyCapsule_GetPointer(capsule, CONVERSATION);
    return line->with != NULL && as_room(&line->room);
}

static int as_piece(ptrdiff_t start, ptrdiff_t segment, const Py_buffer *body)
{
    if (start >= 0 && start <= body->len && segment > 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "no segment begins there");
    return 0;
}

static PyObject *py_receive_segments(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_buffer to, heard;
    Py_ssize_t got, segment;
    line_t line;
    int mark = -1, how = FULL, why = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oiw*nnw*w*", &capsule, &line.descriptor, &to, &got, &segment,
                          &line.room, &heard))
        return NULL;
    int right = as_line(capsule, &line) && as_count(&heard) && as_piece(got, segment, &to);
    if (right) {
        line.count = heard.buf;
        Py_BEGIN_ALLOW_THREADS
        got = segments_received(&line, to.buf, got, to.len, segment, &mark, &how, &why);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&line.room);
    PyBuffer_Release(&heard);
    return right ? Py_BuildValue("(niii)", got, mark, how, why) : NULL;
}

static PyObject *py_send_segments(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    Py_buffer head, body, urgent, handed;
    Py_ssize_t start, segment;
    line_t line;
    int how = FULL, why = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oiy*y*nnw*w*w*", &capsule, &line.descriptor, &head, &body, &start,
                          &segment, &urgent, &line.room, &handed))
        return NULL;
    int right = as_line(capsule, &line) && as_count(&handed) && as_room(&urgent) &&
                as_piece(start, segment, &body);
    if (right) {
        line.count = handed.buf;
        Py_BEGIN_ALLOW_THREADS
        start = segments_sent(&line, &head, &body, start, segment, urgent.buf, &how, &why);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&head);
    PyBuffer_Release(&body);
    PyBuffer_Release(&urgent);
    PyBuffer_Release(&line.room);
    PyBuffer_Release(&handed);
    return right ? Py_BuildValue("(nii)", start, how, why) : NULL;
}

static PyMethodDef METHODS[] = {
    {"squared_norm", py_squared_norm, METH_VARARGS, "squared_norm(values, numel)"},
    {"copy_past", py_copy_past, METH_VARARGS, "copy_past(to, from, bytes), not over one another"},
    {"half_encode", py_half_encode, METH_VARARGS,
     "half_encode(values, added, left, decoded, payload, room, numel) -> all finite"},
    {"half_decode", py_half_decode, METH_VARARGS,
     "half_decode(payload, out or 0, numel, past) -> squared norm; -1: a scale is not finite"},
    {"half_bound", py_half_bound, METH_VARARGS,
     "half_bound(payload, numel) -> at least the squared norm; infinite: maybe a value is; -1: a "
     "scale is not finite"},
    {"half_mix", py_half_mix, METH_VARARGS,
     "half_mix(payload, mean, numel, share, rest) of a payload that was found sound"},
    {"absmax_encode", py_absmax_encode, METH_VARARGS,
     "absmax_encode(values, added, left, decoded, payload, room, numel, width) -> all finite"},
    {"absmax_decode", py_absmax_decode, METH_VARARGS,
     "absmax_decode(payload, out or 0, numel, width, past) -> squared norm; -1: a scale is not "
     "finite"},
    {"absmax_bound", py_absmax_bound, METH_VARARGS,
     "absmax_bound(payload, numel, width) -> as half_bound"},
    {"absmax_mix", py_absmax_mix, METH_VARARGS,
     "absmax_mix(payload, mean, numel, width, share, rest) of a payload that was found sound"},
    {"sum_into", py_sum_into, METH_VARARGS,
     "sum_into(values, added or 0, out, numel) -> squared norm of the sum"},
    {"crc32", py_crc32, METH_VARARGS, "crc32(payload) -> what zlib.crc32 says"},
    {"tls_read", py_tls_read, METH_VARARGS,
     "tls_read(SSL_read, SSL_get_error, ssl, to, wanted) -> (count, why not more or 0)"},
    {"conversation", py_conversation, METH_VARARGS,
     "conversation(ssl, BIO in, BIO out, SSL_read, SSL_write, SSL_get_error, BIO_read, BIO_write, "
     "ERR_clear_error)"},
    {"lock", py_lock, METH_O, "lock(conversation)"},
    {"unlock", py_unlock, METH_O, "unlock(conversation), by the thread that locked it"},
    {"receive_segments", py_receive_segments, METH_VARARGS,
     "receive_segments(conversation or None, descriptor, to, got, segment, room, heard) -> "
     "(got, -1 or the byte that is not MORE, how it ended, why); refused (2): locked"},
    {"send_segments", py_send_segments, METH_VARARGS,
     "send_segments(conversation or None, descriptor, head, body, start, segment, urgent, room, "
     "handed) -> (start of what is left, how it ended, why); refused (2): locked"},
    {NULL, NULL, 0, NULL},
};

static int executed(PyObject *module)
{
    (void)module;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c") || !__builtin_cpu_supports("pclmul")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no AVX2, FMA, F16C and PCLMULQDQ");
        return -1;
    }
    has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("vpclmulqdq");
    make_table();
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, executed}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_native", "See _native.c; nothing but tensors/kernels calls it.",
    0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
