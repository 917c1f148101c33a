/* Norms of the rows of a Jacobian, for chains of 2-d convolutions, slopes and max pooling.
 *
 * Rows (cotangents) ride on SIMD lanes: VL rows of one example go through the chain together, so every multiplication is
 * "one weight times one vector", whatever the sizes of kernels, strides and channels. A tensor is [H][W][C][lane]. Only
 * the window of a tensor that can be other than zero is worked on. Plain C for gcc and clang; no Python, no torch.
 */

#include "cpu_kernel.h"

#include <sched.h>

INLINE void add_norms(Norms *norms, vec v, const Plan *plan)
{
    norms->two += v * v;
    if (plan->wants_one) norms->one += absolute(v);
    if (plan->wants_max) norms->max = larger(absolute(v), norms->max);
}

/* The kernel positions that join output position u to an input position within [low, high). */
static void find_taps(Taps *taps, int u, int kernel, int stride, int padding, int dilation, int low, int high)
{
    taps->count = 0;
    for (int k = 0; k < kernel; k++) {
        int t = u + padding - k * dilation;
        if (t < low * stride || t % stride || t / stride >= high) continue;
        taps->tap[taps->count] = k;
        taps->from[taps->count++] = t / stride;
    }
}

Window reached(const Stage *s, Window in)
{
    Window out = {
        in.y0 * s->sh - s->ph, (in.y1 - 1) * s->sh - s->ph + (s->kh - 1) * s->dh + 1,
        in.x0 * s->sw - s->pw, (in.x1 - 1) * s->sw - s->pw + (s->kw - 1) * s->dw + 1,
    };
    if (out.y0 < 0) out.y0 = 0;
    if (out.x0 < 0) out.x0 = 0;
    if (out.y1 > s->h) out.y1 = s->h;
    if (out.x1 > s->w) out.x1 = s->w;
    return out;
}

/* One place, CB channels. Few channels have several sums each, so that no addition waits for the one before. */
INLINE void one_place(const int CB, const Stage *s, const float *weight, const vec *g, const Taps *ys, const Taps *xs,
                      vec *acc)
{
    const int co = s->co, SUMS = CB <= 4 ? 4 : 1;
    vec part[CB * SUMS];
#pragma GCC unroll 16
    for (int j = 0; j < CB * SUMS; j++) part[j] = (vec){0};
    for (int a = 0; a < ys->count; a++)
        for (int b = 0; b < xs->count; b++) {
            const vec *from = g + ((int64_t)ys->from[a] * s->in_pitch + s->in_left + xs->from[b]) * co;
            const float *w = weight + (int64_t)(ys->tap[a] * s->kw + xs->tap[b]) * co * CB;
            int c = 0;
            for (; c + SUMS <= co; c += SUMS) {
#pragma GCC unroll 4
                for (int k = 0; k < SUMS; k++) {
                    vec v = from[c + k];
#pragma GCC unroll 16
                    for (int j = 0; j < CB; j++) part[k * CB + j] += v * w[(c + k) * CB + j];
                }
            }
            for (; c < co; c++) {
                vec v = from[c];
#pragma GCC unroll 16
                for (int j = 0; j < CB; j++) part[j] += v * w[c * CB + j];
            }
        }
#pragma GCC unroll 16
    for (int j = 0; j < CB; j++) acc[j] = SUMS == 1 ? part[j] : part[j] + part[CB + j] + part[2 * CB + j] + part[3 * CB + j];
}

/* PB places of one phase (columns x, x + stride, ...), CB channels: for tensors of few channels. */
INLINE void some_places(const int CB, const int PB, const Stage *s, const float *weight, const vec *g, const Taps *ys,
                        int x, vec *acc)
{
    const int co = s->co;
#pragma GCC unroll 32
    for (int j = 0; j < CB * PB; j++) acc[j] = (vec){0};
    for (int a = 0; a < ys->count; a++)
        for (int k = 0; k < s->kw; k++) {
            int t = x + s->pw - k * s->dw;
            if (t % s->sw) continue; /* a remainder of zero has no sign */
            const vec *from = g + ((int64_t)ys->from[a] * s->in_pitch + s->in_left + t / s->sw) * co;
            const float *w = weight + (int64_t)(ys->tap[a] * s->kw + k) * co * CB;
            for (int c = 0; c < co; c++) {
#pragma GCC unroll 8
                for (int b = 0; b < PB; b++) {
                    vec v = from[b * co + c];
#pragma GCC unroll 4
                    for (int j = 0; j < CB; j++) acc[b * CB + j] += v * w[c * CB + j];
                }
            }
        }
}

/* What one stage writes to, or sums up. */
typedef struct { const Plan *plan; const Stage *s; const float *scale; vec *out; Norms *norms; } Sink;

INLINE void put(const Sink *sink, int y, int x, int c, vec v)
{
    const Stage *s = sink->s;
    if (sink->scale) v *= sink->scale[((int64_t)y * s->w + x) * s->ci + c];
    if (sink->out) sink->out[((int64_t)y * s->out_pitch + s->out_left + x) * s->ci + c] = v;
    else add_norms(sink->norms, v, sink->plan);
}

#define ONE(CB) \
    case CB: { \
        vec acc[CB]; \
        one_place(CB, s, weight, g, ys, xs, acc); \
        for (int j = 0; j < CB; j++) put(sink, y, x, c + j, acc[j]); \
        break; \
    }

static void place(const Sink *sink, const vec *g, const Taps *ys, const Taps *xs, int y, int x)
{
    const Stage *s = sink->s;
    const float *weight = s->weight;
    for (int c = 0; c < s->ci;) {
        int left = s->ci - c, cb = left >= 16 ? 16 : left >= 12 ? 12 : left >= 8 ? 8 : left >= 4 ? 4 : left;
        switch (cb) { ONE(1) ONE(2) ONE(3) ONE(4) ONE(8) ONE(12) ONE(16) }
        weight += (int64_t)s->kh * s->kw * s->co * cb;
        c += cb;
    }
}

#define SOME(CB, PB) \
    case CB * 16 + PB: { \
        vec acc[CB * PB]; \
        some_places(CB, PB, s, s->weight, g, ys, x, acc); \
        for (int b = 0; b < PB && x + b * s->sw < win.x1; b++) \
            for (int j = 0; j < CB; j++) put(sink, y, x + b * s->sw, j, acc[b * CB + j]); \
        break; \
    }

static void row_of_places(const Sink *sink, const vec *g, const Taps *ys, int y, Window win)
{
    const Stage *s = sink->s;
    for (int phase = 0; phase < s->sw; phase++)
        for (int x = win.x0 + phase; x < win.x1; x += s->blocked * s->sw)
            switch (s->ci * 16 + s->blocked) {
                SOME(1, 8) SOME(2, 8) SOME(3, 8) SOME(1, 4) SOME(2, 4) SOME(3, 4) SOME(4, 4)
            }
}

/* Zeros beside a window, as far as a blocked stage will read. */
static void clear_beside(const Stage *s, vec *g, Window in)
{
    Window win = reached(s, in);
    int reach = win.x0 + s->pw - (s->kw - 1) * s->dw;
    int low = reach < 0 ? -(-reach / s->sw) : reach / s->sw, high = (win.x1 - 1 + s->pw) / s->sw + 1;
    for (int y = in.y0; y < in.y1; y++) {
        vec *row = g + ((int64_t)y * s->in_pitch + s->in_left) * s->co;
        if (low < in.x0) memset(row + (int64_t)low * s->co, 0, sizeof(vec) * (in.x0 - low) * s->co);
        if (high > in.x1) memset(row + (int64_t)in.x1 * s->co, 0, sizeof(vec) * (high - in.x1) * s->co);
    }
}

static Window convolve(const Sink *sink, const vec *g, Window in)
{
    const Stage *s = sink->s;
    Window win = reached(s, in);
    Taps ys, *xs = malloc(sizeof(Taps) * (win.x1 > win.x0 ? win.x1 - win.x0 : 1));
    Norms all = *sink->norms;
    for (int x = win.x0; x < win.x1; x++)
        find_taps(&xs[x - win.x0], x, s->kw, s->sw, s->pw, s->dw, in.x0, in.x1);
    for (int y = win.y0; y < win.y1; y++) {
        Norms row = {{0}, {0}, {0}}; /* summed row by row: shorter sums, smaller rounding errors */
        Sink here = {sink->plan, s, sink->scale, sink->out, &row};
        find_taps(&ys, y, s->kh, s->sh, s->ph, s->dh, in.y0, in.y1);
        if (s->blocked) row_of_places(&here, g, &ys, y, win);
        else for (int x = win.x0; x < win.x1; x++) place(&here, g, &ys, &xs[x - win.x0], y, x);
        all.two += row.two;
        all.one += row.one;
        all.max = larger(row.max, all.max);
    }
    *sink->norms = all;
    free(xs);
    return win;
}

static Window unpool(const Sink *sink, const vec *g, Window in, const int64_t *index)
{
    const Stage *s = sink->s;
    Window win = reached(s, in);
    for (int y = win.y0; y < win.y1; y++)
        memset(sink->out + ((int64_t)y * s->out_pitch + s->out_left + win.x0) * s->ci, 0,
               sizeof(vec) * (win.x1 - win.x0) * s->ci);
    for (int oy = in.y0; oy < in.y1; oy++)
        for (int ox = in.x0; ox < in.x1; ox++)
            for (int c = 0; c < s->ci; c++) {
                int64_t at = index[((int64_t)oy * s->ow + ox) * s->co + c];
                int64_t y = at / s->w, x = at % s->w;
                vec v = g[((int64_t)oy * s->in_pitch + s->in_left + ox) * s->co + c];
                if (sink->scale) v *= sink->scale[at * s->ci + c];
                sink->out[(y * s->out_pitch + s->out_left + x) * s->ci + c] += v;
            }
    return win;
}

/* The first stage: each lane's row is a kernel, put where its entry looks. */
Window paste(const Stage *s, const float *kernel, const int64_t *row, int lanes, const float *scale, vec *out)
{
    Window in = {s->oh, 0, s->ow, 0}, win;
    for (int l = 0; l < lanes; l++) {
        int y = row[l] / s->ow % s->oh, x = row[l] % s->ow;
        if (y < in.y0) in.y0 = y;
        if (y >= in.y1) in.y1 = y + 1;
        if (x < in.x0) in.x0 = x;
        if (x >= in.x1) in.x1 = x + 1;
    }
    win = reached(s, in);
    for (int y = win.y0; y < win.y1; y++)
        memset(out + ((int64_t)y * s->out_pitch + s->out_left + win.x0) * s->ci, 0,
               sizeof(vec) * (win.x1 > win.x0 ? win.x1 - win.x0 : 0) * s->ci);
    for (int l = 0; l < lanes; l++) {
        int c = row[l] / ((int64_t)s->oh * s->ow);
        int top = (int)(row[l] / s->ow % s->oh) * s->sh - s->ph, left = (int)(row[l] % s->ow) * s->sw - s->pw;
        const float *own = kernel + (int64_t)c * s->kh * s->kw * s->ci;
        for (int ky = 0; ky < s->kh; ky++)
            for (int kx = 0; kx < s->kw; kx++) {
                int y = top + ky * s->dh, x = left + kx * s->dw;
                if (y < 0 || y >= s->h || x < 0 || x >= s->w) continue;
                const float *w = own + (int64_t)(ky * s->kw + kx) * s->ci;
                const float *by = scale ? scale + ((int64_t)y * s->w + x) * s->ci : NULL;
                float *to = (float *)(out + ((int64_t)y * s->out_pitch + s->out_left + x) * s->ci) + l;
                for (int k = 0; k < s->ci; k++) to[(int64_t)k * VL] = by ? w[k] * by[k] : w[k];
            }
    }
    return win;
}

static void sum_window(const Plan *plan, const Stage *s, const vec *out, Window win, Norms *norms)
{
    for (int y = win.y0; y < win.y1; y++)
        for (int x = win.x0; x < win.x1; x++)
            for (int c = 0; c < s->ci; c++)
                add_norms(norms, out[((int64_t)y * s->out_pitch + s->out_left + x) * s->ci + c], plan);
}

/* Take what is in *a, within a window, through stages [from, to); swap the buffers so that *a holds the outcome. With
 * norms, the last stage of all sums up in place of writing. */
Window through(const Plan *plan, int from, int to, int example, Window win, vec **a, vec **b, Norms *norms)
{
    Norms none;
    for (int k = from; k < to; k++) {
        const Stage *s = plan->stage + k;
        const float *scale = s->scale ? s->scale + example * s->scale_stride : NULL;
        int last = k == plan->stages - 1, sums = last && norms && s->kind == CONVOLUTION;
        Sink sink = {plan, s, scale, sums ? NULL : *b, norms ? norms : &none};
        if (s[-1].h != s->oh || s[-1].w != s->ow) win = (Window){0, s->oh, 0, s->ow}; /* a flattened image */
        if (s->blocked) clear_beside(s, *a, win);
        if (s->kind == CONVOLUTION) win = convolve(&sink, *a, win);
        else win = unpool(&sink, *a, win, s->index + example * s->index_stride);
        if (sums) break;
        if (last && norms) sum_window(plan, s, *b, win, norms);
        vec *swap = *a;
        *a = *b;
        *b = swap;
    }
    return win;
}

static void one_group(const Plan *plan, int example, int first, int lanes, vec *a, vec *b)
{
    const int64_t *row = plan->row + (plan->row_lists > 1 ? (int64_t)example * plan->rows : 0) + first;
    const Stage *s = plan->stage;
    const float *scale = s->scale ? s->scale + example * s->scale_stride : NULL;
    int split = plan->gram.split;
    Norms norms = {{0}, {0}, {0}};
    Window win = paste(s, plan->kernel, row, lanes, scale, a);
    if (plan->stages == 1) sum_window(plan, s, a, win, &norms);
    if (split) win = through(plan, 1, split, example, win, &a, &b, &norms);
    if (!split || !norms_by_gram(plan, example, lanes, a, win, &norms))
        through(plan, split ? split : 1, plan->stages, example, win, &a, &b, &norms);
    int64_t at = (int64_t)example * plan->rows + first;
    for (int l = 0; l < lanes; l++) {
        plan->two[at + l] = sqrtf(norms.two[l]);
        if (plan->wants_one) plan->one[at + l] = norms.one[l];
        if (plan->wants_max) plan->max[at + l] = norms.max[l];
    }
}

static void wait_for(const int64_t *count, int64_t wanted)
{
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted) sched_yield();
}

/* One piece of an example's work: the rows of a place, the blocks of a place, or a group of rows. Pieces are handed out in
 * this order, so whoever waits, waits for pieces that others are at. Two examples' matrices are kept. */
static void piece(const Plan *plan, int example, int64_t at, int64_t places, int64_t groups, vec *a, vec *b)
{
    int64_t *rows = plan->gram.done + example, *blocks = rows + plan->examples, *sums = blocks + plan->examples;
    if (at < places) {
        if (example > 1) wait_for(sums - 2, groups);
        patch_of_place(plan, example, (int)at, a, b);
        __atomic_fetch_add(rows, 1, __ATOMIC_RELEASE);
    } else if (at < 2 * places) {
        wait_for(rows, places);
        blocks_of_place(plan, example, (int)(at - places));
        __atomic_fetch_add(blocks, 1, __ATOMIC_RELEASE);
    } else {
        int first = (int)(at - 2 * places) * VL;
        if (places) wait_for(blocks, places);
        one_group(plan, example, first, plan->rows - first < VL ? plan->rows - first : VL, a, b);
        if (places) __atomic_fetch_add(sums, 1, __ATOMIC_RELEASE);
    }
}

/* Work until nothing is left; any number of threads may. Returns 0, or 1 where there is no memory. */
int lanes_run(const Plan *plan)
{
    vec *a = NULL, *b = NULL;
    int failed = posix_memalign((void **)&a, 64, plan->buffer * sizeof(vec)) ||
                 posix_memalign((void **)&b, 64, plan->buffer * sizeof(vec));
    const Stage *split = plan->stage + plan->gram.split;
    int64_t places = plan->gram.split ? (int64_t)split->oh * split->ow : 0, groups = (plan->rows + VL - 1) / VL;
    int64_t each = 2 * places + groups;
    while (!failed) {
        int64_t at = __atomic_fetch_add(plan->next, 1, __ATOMIC_RELAXED);
        if (at >= each * plan->examples) break;
        piece(plan, (int)(at / each), at % each, places, groups, a, b);
    }
    free(a);
    free(b);
    return failed;
}

int lanes_abi(void) { return ABI; }

int lanes_width(void) { return VL; }

/* Whether this processor has the instructions the file was compiled for: setup.py compiles it for several. */
int lanes_supported(void)
{
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}
