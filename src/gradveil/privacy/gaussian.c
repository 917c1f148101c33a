/* Gaussian noise from words of a cipher, added to a sum and rounded to a public grid. Plain C; no Python, no torch.
 *
 * Words come in blocks of 2 PAIRS: PAIRS radii, then as many angles. A block makes as many numbers: the first of every
 * pair, then the second. All loops are free of branches and calls, so that the compiler works on whole vectors; the
 * polynomials are those of fdlibm (Sun Microsystems, 1993), below one unit in the last place.
 */

#include <stdint.h>
#include <string.h>

#define PAIRS 256
#define BLOCK (2 * PAIRS)
#define INLINE static inline __attribute__((always_inline))

INLINE double as_double(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
INLINE uint64_t as_bits(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }

#if defined(__AVX512DQ__)
INLINE double number(int64_t word) { return (double)word; }
INLINE double rounded(double x) { return __builtin_rint(x); }
#else
/* A number with its sign: both halves are exact, and their sum is rounded once. */
INLINE double number(int64_t word)
{
    const uint64_t bits = (uint64_t)word ^ 0x8000000000000000u;
    const double high = as_double((bits >> 32) | 0x4530000000000000u) - (0x1p84 + 0x1p63);
    return high + (as_double((bits & 0xffffffffu) | 0x4330000000000000u) - 0x1p52);
}
#if defined(__SSE4_1__)
INLINE double rounded(double x) { return __builtin_rint(x); }
#else
INLINE double rounded(double x) /* to the nearest whole number, ties to even */
{
    const double size = x < 0 ? -x : x;
    const double whole = size < 0x1p52 ? (size + 0x1p52) - 0x1p52 : size;
    return x < 0 ? -whole : whole;
}
#endif
#endif

/* -log(u) for u = (word + 1/2) / 2^64, from the nearer end. */
INLINE double minus_log(uint64_t word)
{
    const int64_t from_end = (int64_t)word ^ -(int64_t)(word >> 63);
    const double x = number(from_end) * 0x1p-64 + 0x1p-65; /* up to a half */
    const double y = word >> 63 ? 1 - x : x;
    const uint64_t bits = as_bits(y) + (0x3ff0000000000000u - 0x3fe6a09e00000000u);
    const uint64_t power = bits >> 52;
    const double m = as_double((bits & 0x000fffffffffffffu) + 0x3fe6a09e00000000u); /* from 0.7 to 1.4 */
    const double k = as_double(power | 0x4330000000000000u) - (0x1p52 + 1023);
    const double f = y > 0.7072 ? -x : m - 1;
    const double s = f / (2 + f), z = s * s, w = z * z;
    const double odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double even = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01
                        + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    return k * -6.93147180559945309417e-01 - s * (2 + (odd + even));
}

/* Two normal numbers of two words. */
INLINE void normals(uint64_t one, uint64_t other, double *first, double *second)
{
    const double radius = __builtin_sqrt(2 * minus_log(one));
    /* the lower 62 bits of the angle are a number with its sign, within an eighth of a turn */
    const double a = number((int64_t)((other << 2) | 2)) * (0.78539816339744830962 * 0x1p-63), z = a * a;
    const double sine = a + a * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03
                        + z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06
                        + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    const double cosine = 1 + z * (-0.5 + z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03
                        + z * (2.48015872894767294178e-05 + z * (-2.75573143513906633035e-07
                        + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11))))));
    const double near = radius * sine;
    const double far = as_double(as_bits(radius * cosine) ^ (other & 0x8000000000000000u));
    const int turned = (other >> 62) & 1;
    *first = turned ? near : far;
    *second = turned ? far : near;
}

/* A sum with noise, in units of the grid. What is left of the sum is exact, so its size does not matter. */
INLINE double on_grid(double sum, double noise)
{
    const double finite = sum - sum == 0 ? sum : 0, whole = rounded(finite);
    return whole + rounded((finite - whole) + noise);
}

typedef struct {
    const uint64_t *words; /* whole blocks */
    const void *sum;       /* of one of the types below, or nothing: then only the noise is written, in float64 */
    void *out;             /* of the same type */
    int64_t count;
    double std, grid;
    int32_t is_double;
} Noise;

INLINE void block(const uint64_t *restrict words, const double *restrict sum, double *restrict out, double std,
                  double grid)
{
    const double per_grid = 1 / grid, share = std / grid;
    for (int i = 0; i < PAIRS; i++) {
        double first, second;
        normals(words[i], words[PAIRS + i], &first, &second);
        out[i] = on_grid(sum[i] * per_grid, first * share) * grid;
        out[PAIRS + i] = on_grid(sum[PAIRS + i] * per_grid, second * share) * grid;
    }
}

INLINE void block_of_floats(const uint64_t *restrict words, const float *restrict sum, float *restrict out, double std,
                            double grid)
{
    const double per_grid = 1 / grid, share = std / grid;
    for (int i = 0; i < PAIRS; i++) {
        double first, second;
        normals(words[i], words[PAIRS + i], &first, &second);
        out[i] = (float)(on_grid(sum[i] * per_grid, first * share) * grid);
        out[PAIRS + i] = (float)(on_grid(sum[PAIRS + i] * per_grid, second * share) * grid);
    }
}

INLINE void bare(const uint64_t *restrict words, double *restrict out, double std)
{
    for (int i = 0; i < PAIRS; i++) {
        double first, second;
        normals(words[i], words[PAIRS + i], &first, &second);
        out[i] = first * std;
        out[PAIRS + i] = second * std;
    }
}

static void one_block(const Noise *n, const uint64_t *words, const void *sum, void *out)
{
    if (!sum) bare(words, out, n->std);
    else if (n->is_double) block(words, sum, out, n->std, n->grid);
    else block_of_floats(words, sum, out, n->std, n->grid);
}

/* Noise that is there already, added to a sum and rounded. */
void noise_add(const double *restrict noise, const void *restrict sum, void *restrict out, int64_t count, double grid,
               int32_t is_double)
{
    const double per_grid = 1 / grid;
    if (is_double) {
        const double *from = sum;
        double *to = out;
        for (int64_t i = 0; i < count; i++) to[i] = on_grid(from[i] * per_grid, noise[i] * per_grid) * grid;
    } else {
        const float *from = sum;
        float *to = out;
        for (int64_t i = 0; i < count; i++) to[i] = (float)(on_grid(from[i] * per_grid, noise[i] * per_grid) * grid);
    }
}

int noise_abi(void) { return 2; }
int noise_block(void) { return BLOCK; }

int noise_supported(void)
{
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

void noise_run(const Noise *n)
{
    const int64_t bytes = n->is_double || !n->sum ? 8 : 4;
    int64_t at = 0;
    for (; at + BLOCK <= n->count; at += BLOCK)
        one_block(n, n->words + at, n->sum ? (const char *)n->sum + at * bytes : 0, (char *)n->out + at * bytes);
    if (at < n->count) { /* the last numbers go through a block of their own */
        double sum[BLOCK] = {0}, out[BLOCK];
        if (n->sum) memcpy(sum, (const char *)n->sum + at * bytes, (n->count - at) * bytes);
        one_block(n, n->words + at, n->sum ? sum : 0, out);
        memcpy((char *)n->out + at * bytes, out, (n->count - at) * bytes);
    }
}
