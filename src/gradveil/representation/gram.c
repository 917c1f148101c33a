/* Norms from a Gram matrix halfway: ||aB||² = a (BBᵀ) aᵀ.
 *
 * The rows B of a tensor near the input are short: a place sees only a window of the input. So their Gram matrix has
 * blocks for neighbouring places only, and a quadratic form takes fewer multiplications than the layers that remain.
 */

#include "cpu_kernel.h"

static Window window_of_place(const Plan *plan, int y, int x)
{
    Window win = {y, y + 1, x, x + 1};
    for (int k = plan->gram.split; k < plan->stages; k++) win = reached(plan->stage + k, win);
    return win;
}

static vec *patch_at(const Plan *plan, int example, int place)
{
    const Stage *s = plan->stage + plan->gram.split;
    return plan->gram.patch + ((int64_t)(example % 2) * s->oh * s->ow + place) * plan->gram.patch_size;
}

/* The rows of all channels of one place, one on each lane, kept as far as their window goes. */
void patch_of_place(const Plan *plan, int example, int place, vec *a, vec *b)
{
    int k = plan->gram.split;
    const Stage *s = plan->stage + k, *last = plan->stage + plan->stages - 1;
    int64_t row[VL];
    for (int c = 0; c < s->co; c++) row[c] = (int64_t)c * s->oh * s->ow + place;
    Window win = paste(s, plan->gram.kernel, row, s->co, s->scale ? s->scale + example * s->scale_stride : NULL, a);
    win = through(plan, k + 1, plan->stages, example, win, &a, &b, NULL);
    vec *to = patch_at(plan, example, place);
    int64_t across = (int64_t)(win.x1 - win.x0) * last->ci;
    for (int y = win.y0; y < win.y1; y++, to += across)
        memcpy(to, a + ((int64_t)y * last->out_pitch + last->out_left + win.x0) * last->ci, across * sizeof(vec));
}

INLINE void multiply(const int CB, const vec *mine, const vec *other, int64_t count, vec *acc)
{
    for (int64_t e = 0; e < count; e++) {
        const float *by = (const float *)(other + e);
#pragma GCC unroll 16
        for (int j = 0; j < CB; j++) acc[j] += mine[e] * by[j];
    }
}

/* One block: entry [c'][c] is the product of row c of a place with row c' of another. */
INLINE void one_block(const int CB, const Plan *plan, int example, int place, int other, Window win, float *out)
{
    const Stage *s = plan->stage + plan->gram.split;
    int ci = plan->stage[plan->stages - 1].ci;
    Window its = window_of_place(plan, other / s->ow, other % s->ow);
    const vec *mine = patch_at(plan, example, place), *theirs = patch_at(plan, example, other);
    int x0 = its.x0 > win.x0 ? its.x0 : win.x0, x1 = its.x1 < win.x1 ? its.x1 : win.x1;
    int y0 = its.y0 > win.y0 ? its.y0 : win.y0, y1 = its.y1 < win.y1 ? its.y1 : win.y1;
    vec acc[CB];
#pragma GCC unroll 16
    for (int j = 0; j < CB; j++) acc[j] = (vec){0};
    for (int y = y0; y < y1; y++)
        multiply(CB, mine + ((int64_t)(y - win.y0) * (win.x1 - win.x0) + x0 - win.x0) * ci,
                 theirs + ((int64_t)(y - its.y0) * (its.x1 - its.x0) + x0 - its.x0) * ci, (int64_t)(x1 - x0) * ci, acc);
    float factor = place == other ? 1 : 2; /* the block on the other side of the diagonal */
#pragma GCC unroll 16
    for (int j = 0; j < CB; j++) {
        vec row = factor * acc[j];
        if (j < s->co) memcpy(out + j * CB, &row, CB * sizeof(float));
    }
}

#define FOR_EACH_BLOCK(DO) \
    switch (plan->gram.block) { \
        case 1: DO(1) break; \
        case 2: DO(2) break; \
        case 3: DO(3) break; \
        case 4: DO(4) break; \
        case 8: DO(8) break; \
        case 12: DO(12) break; \
        case 16: DO(16) break; \
    }

void blocks_of_place(const Plan *plan, int example, int place)
{
    const Stage *s = plan->stage + plan->gram.split;
    int y = place / s->ow, x = place % s->ow;
    Window win = window_of_place(plan, y, x);
    float *out = plan->gram.matrix + (example % 2) * plan->gram.matrix_size + plan->gram.offset[place];
    for (int v = y; v <= plan->gram.last_y[y]; v++)
        for (int u = v == y ? x : plan->gram.first_x[x]; u <= plan->gram.last_x[x]; u++) {
#define BLOCK(CB) if (CB <= VL) one_block(CB, plan, example, place, v * s->ow + u, win, out);
            FOR_EACH_BLOCK(BLOCK)
            out += s->co * plan->gram.block;
        }
}

INLINE void quadratic(const int CB, const Plan *plan, int example, const vec *a, Window win, vec *form, vec *diagonal)
{
    const Stage *s = plan->stage + plan->gram.split;
    const float *matrix = plan->gram.matrix + (example % 2) * plan->gram.matrix_size;
    const int co = s->co;
    for (int y = win.y0; y < win.y1; y++)
        for (int x = win.x0; x < win.x1; x++) {
            const float *block = matrix + plan->gram.offset[y * s->ow + x], *first = block;
            const vec *mine = a + ((int64_t)y * s->in_pitch + s->in_left + x) * co;
            vec acc[CB], sum = {0};
#pragma GCC unroll 16
            for (int j = 0; j < CB; j++) acc[j] = (vec){0};
            for (int v = y; v <= plan->gram.last_y[y]; v++) {
                int from = v == y ? x : plan->gram.first_x[x], to = plan->gram.last_x[x] + 1;
                int low = from > win.x0 ? from : win.x0, high = to < win.x1 ? to : win.x1;
                const float *w = block + (int64_t)(low - from) * co * CB;
                const vec *g = a + ((int64_t)v * s->in_pitch + s->in_left + low) * co;
                if (v < win.y1)
                    for (int e = 0; e < (high - low) * co; e++) {
#pragma GCC unroll 16
                        for (int j = 0; j < CB; j++) acc[j] += g[e] * w[e * CB + j];
                    }
                block += (int64_t)(to - from) * co * CB;
            }
            for (int c = 0; c < co; c++) {
                sum += mine[c] * acc[c];
                *diagonal += mine[c] * mine[c] * first[c * CB + c];
            }
            *form += sum;
        }
}

/* Return whether the form is exact enough for all lanes: positive, and not the small difference of large sums. */
int norms_by_gram(const Plan *plan, int example, int lanes, const vec *a, Window win, Norms *norms)
{
    vec form = {0}, diagonal = {0};
#define FORM(CB) quadratic(CB, plan, example, a, win, &form, &diagonal);
    FOR_EACH_BLOCK(FORM)
    for (int l = 0; l < lanes; l++)
        if (!(form[l] > 1e-30f && form[l] > 0.02f * diagonal[l])) return 0;
    norms->two = form;
    return 1;
}
