/* What the two files of the kernel share: the plan of a call, and how vectors and windows are handled. */

#ifndef LANES_H
#define LANES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define VL 16
#elif defined(__SSE2__) && !defined(__AVX__)
#define VL 4
#else
#define VL 8
#endif

#define ABI 4
#define MOST_TAPS 64 /* kernel rows or columns */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t bits __attribute__((vector_size(VL * 4)));

enum { CONVOLUTION = 0, MAX_POOL = 1 };

typedef struct {
    int32_t kind;
    int32_t co, oh, ow;             /* the tensor that cotangents come from */
    int32_t ci, h, w;               /* the tensor they go to */
    int32_t kh, kw, sh, sw, ph, pw, dh, dw;
    int32_t in_left, in_pitch;      /* columns of zeros before a row of the first tensor, and columns in all */
    int32_t out_left, out_pitch;    /* the same of the second */
    int32_t blocked;                /* few channels: several columns at a time */
    int32_t unused;
    int64_t scale_stride;           /* floats from one example's slopes to the next; 0: shared */
    const float *weight;            /* blocks of channels: [block][kh][kw][co][channels of the block] */
    const float *scale;             /* slopes of the second tensor, [h][w][ci], or NULL */
    const int64_t *index;           /* max pooling: [oh][ow][c] -> y * w + x, for each example */
    int64_t index_stride;
} Stage;

/* Rows stop at the tensor that stage ``split`` starts from, and their norms come from the Gram matrix of that tensor's
 * own rows: blocks of channels for every two places whose rows overlap, the second not before the first. */
typedef struct {
    int32_t split;                             /* 0: rows go all the way */
    int32_t block;                             /* columns of a block of the matrix, at least the tensor's channels */
    const float *kernel;                       /* of stage ``split``: [co][kh][kw][ci] */
    const int32_t *last_y, *first_x, *last_x;  /* by row, by column: the neighbours whose rows overlap, inclusive */
    const int64_t *offset;                     /* by place: where its blocks begin */
    int64_t matrix_size, patch_size;           /* floats of one example's matrix; vectors of one place's rows */
    float *matrix;                             /* [2][matrix_size]: of two examples in turn */
    vec *patch;                                /* [2][places][patch_size]: the rows of each place, in their window */
    int64_t *done;                             /* [3][examples]: places with rows, places with blocks, groups */
} Gram;

typedef struct {
    int32_t stages, examples, rows, row_lists; /* row_lists: 1 (shared) or examples */
    int32_t wants_one, wants_max;              /* beside the 2-norm: the 1-norm, the max-norm */
    const Stage *stage;
    const int64_t *row;                        /* [row_lists][rows]: flat [C][H][W] position in the first tensor */
    const float *kernel;                       /* of the first stage: [co][kh][kw][ci] */
    float *two, *one, *max;                    /* [examples][rows] */
    int64_t *next;                             /* the next piece of work, shared by all threads */
    int64_t buffer;                            /* vectors of the largest tensor */
    Gram gram;
} Plan;

typedef struct { int y0, y1, x0, x1; } Window;
typedef struct { int count; int tap[MOST_TAPS]; int from[MOST_TAPS]; } Taps;
typedef struct { vec two, one, max; } Norms;

INLINE vec absolute(vec v) { return (vec)((bits)v & 0x7fffffff); }

INLINE vec larger(vec a, vec b)
{
    bits which = a > b;
    return (vec)(((bits)a & which) | ((bits)b & ~which));
}

Window reached(const Stage *s, Window in);
Window paste(const Stage *s, const float *kernel, const int64_t *row, int lanes, const float *scale, vec *out);
Window through(const Plan *plan, int from, int to, int example, Window win, vec **a, vec **b, Norms *norms);

/* gram.c */
void patch_of_place(const Plan *plan, int example, int place, vec *a, vec *b);
void blocks_of_place(const Plan *plan, int example, int place);
int norms_by_gram(const Plan *plan, int example, int lanes, const vec *a, Window win, Norms *norms);

#endif
