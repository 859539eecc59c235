/* The C interface of the CPU backend's native library: kernels on flat buffers, and collectives through
 * shared memory. It takes plain pointers and integers, so that one binary works with every Python and torch.
 *
 * Unless said otherwise, a pointer is to the first element of a contiguous array. threads: how many threads
 * may work, including the caller.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define ACCELZ_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever a signature or a meaning below does; the Python side refuses any other value. */
enum { ACCELZ_ABI = 10 };

enum { ACCELZ_FLOAT32, ACCELZ_BFLOAT16, ACCELZ_FLOAT16, ACCELZ_FLOAT64, ACCELZ_INT64, ACCELZ_INT32, ACCELZ_UINT8,
       ACCELZ_INT8, ACCELZ_FLOAT8_E4M3 };
enum { ACCELZ_SUM, ACCELZ_MAX, ACCELZ_MIN };
enum { ACCELZ_ALL_GATHER, ACCELZ_BROADCAST, ACCELZ_REDUCE_SCATTER, ACCELZ_ALL_REDUCE, ACCELZ_ALL_TO_ALL };

ACCELZ_API int accelz_abi(void);

/* The instruction set in use: "avx512", "avx2" or "baseline". */
ACCELZ_API const char *accelz_isa(void);

/* Use another instruction set, for tests. Returns 0, or -1 if this machine or build does not have it. */
ACCELZ_API int accelz_use_isa(const char *name);

/* Why the last call on this thread failed. */
ACCELZ_API const char *accelz_last_error(void);

/* ---- kernels: dtypes FLOAT32, BFLOAT16 and FLOAT16 ---- */

enum { ACCELZ_CONSTANTS = 8, ACCELZ_MOMENTS_BLOCK = 256 };

/* A step of any optimizer. The fields are those of accelz.updates.Update; what an optimizer does not have is NULL. */
typedef struct {
    float *master;    /* read and written, like the moments; NULL if split */
    int16_t *remainder; /* of split masters, whose rounding is in weights (BFLOAT16), which is read too; or NULL */
    const void *grad; /* of grad_dtype */
    void *moments[2]; /* of moments_dtype: FLOAT32, BFLOAT16 or UINT8 */
    float *scales[2]; /* of moments in UINT8, which are codes: one for each ACCELZ_MOMENTS_BLOCK of a moment */
    void *weights;           /* master rounded to weights_dtype, or NULL */
    const float *step;       /* one value: the number of this step, from 1 */
    const float *grad_scale; /* one value, or NULL for 1 */
    const float *skip;       /* one value: if not 0, only weights are written; or NULL */
    size_t numel;
    int grad_dtype, weights_dtype, moments_dtype;
    int stochastic; /* if not 0, moments in BFLOAT16 are rounded up or down at random */
    double lr, sign, decay, l2; /* sign: -1 to maximise */
    double constants[ACCELZ_CONSTANTS];
} accelz_update;

/* The name of an optimizer, as in accelz.updates; NULL for numbers that no optimizer has. */
ACCELZ_API const char *accelz_optimizer(int number);
ACCELZ_API void accelz_step(int optimizer, const accelz_update *update, int threads);

/* The sum of squares. Values are squared and first added in fp32, in an order that depends only on numel. */
ACCELZ_API double accelz_sum_of_squares(const void *values, int dtype, size_t numel, int threads);

/* output = source * scale, computed in fp32 and rounded once. scale: one value, or NULL for 1. */
ACCELZ_API void accelz_scale_cast(void *output, int output_dtype, const void *source, int source_dtype,
                                  const float *scale, size_t numel, int threads);

/* total += addend, computed in fp32 and rounded once. */
ACCELZ_API void accelz_accumulate(void *total, int total_dtype, const void *addend, int addend_dtype,
                                  size_t numel, int threads);

enum { ACCELZ_MAX_BLOCK = 4096 };

/* codes = source / the scale of its block, rounded to the nearest. scales: numel / block values, rounded up.
 * codes_dtype: INT8 or FLOAT8_E4M3. block: a power of two from 32 to ACCELZ_MAX_BLOCK. See accelz.Kernels. */
ACCELZ_API void accelz_quantise(void *codes, int codes_dtype, float *scales, const void *source, int source_dtype,
                                size_t numel, size_t block, int threads);

/* output = codes * the scale of the block, computed in fp32 and rounded once. */
ACCELZ_API void accelz_dequantise(void *output, int output_dtype, const void *codes, int codes_dtype,
                                  const float *scales, size_t numel, size_t block, int threads);

/* output[i] = rows[0][i] op rows[1][i] op …, for `count` rows of numel elements of any dtype, one row after
 * another in memory. They are combined in this order; 16-bit values are added in fp32 and rounded once; max and min
 * keep NaN. */
ACCELZ_API void accelz_reduce(void *output, const void *rows, int count, int dtype, int op, size_t numel,
                              int threads);

/* ---- collectives between the processes of one host ----
 *
 * A channel is one rank's end of a group. Ranks create channels, tell each other their process id and
 * descriptor (in any way they like), and connect. Movements (all_gather, all_to_all, broadcast) and reductions
 * (reduce_scatter, all_reduce) are two sequences; within each, all ranks issue the same collectives in the
 * same order. Functions that can fail return a negative number and leave the reason in accelz_last_error().
 */

typedef struct accelz_channel accelz_channel;

/* Returns NULL on failure, when no shared memory can be had. */
ACCELZ_API accelz_channel *accelz_channel_create(int rank, int size);
ACCELZ_API int accelz_channel_descriptor(const accelz_channel *channel);

/* Map the channels of all ranks, given their process ids and descriptors by rank. */
ACCELZ_API int accelz_channel_connect(accelz_channel *channel, const int64_t *processes, const int *descriptors);

/* Publish this rank's part of a collective without waiting for other ranks (except for ranks that are more than a
 * hundred collectives behind). Returns the collective's ticket.
 *
 * op, reduce, dtype: as above, except ACCELZ_ALL_TO_ALL, which is started below; movements can carry any dtype as
 * UINT8. count: elements of the shard (all_gather, reduce_scatter) or of the tensor. source: the rank that
 * broadcasts. input and output must stay unchanged until accelz_finish; in broadcast and all_reduce they are the
 * same. An all_gather writes this rank's part of output at once. If input is NULL, the output of the all_gather is
 * memory that the ranks have in common, with every shard at its place: nothing is copied, and it is complete when
 * all ranks have started it. timeout_seconds: how long accelz_finish may wait.
 */
ACCELZ_API int64_t accelz_start(accelz_channel *channel, int op, int reduce, int dtype, size_t count, int source,
                                void *output, const void *input, double timeout_seconds, int threads);

/* The same for ACCELZ_ALL_TO_ALL. sent[r], received[r]: elements of input for rank r, and of output from rank r, in
 * rank order, for every rank. This rank's own part is written at once. If a rank expects another number than it is
 * sent, it fails, and all ranks with it. */
ACCELZ_API int64_t accelz_start_all_to_all(accelz_channel *channel, int dtype, void *output, const uint64_t *received,
                                           const void *input, const uint64_t *sent, double timeout_seconds,
                                           int threads);

/* Wait for the other ranks' parts and write the output, unless that is done already: when many collectives are in
 * progress, accelz_start completes the oldest. After a failure the group cannot be used again. */
ACCELZ_API int accelz_finish(accelz_channel *channel, int64_t ticket, int threads);

/* Give up a ticket: nothing more is written to its output. */
ACCELZ_API void accelz_abandon(accelz_channel *channel, int64_t ticket);

/* Give up the group: tell the other ranks that there will be no further collective, and why. */
ACCELZ_API void accelz_channel_fail(accelz_channel *channel, const char *reason);

/* Memory for the input of reduce_scatters: others then read it there, and nothing is copied. It may be written until
 * one starts with it, and not again, not even after accelz_finish: others may be reading. The result is DLPack's
 * DLManagedTensor, of bytes; by its deleter the caller gives it back, to be used again once all have read it. That
 * may be after the channel was closed. NULL if there is no memory, or too many have been lent. */
ACCELZ_API void *accelz_lend(accelz_channel *channel, size_t bytes);

/* Bytes of shared memory that this rank holds for the group now. */
ACCELZ_API size_t accelz_channel_bytes(const accelz_channel *channel);

/* Leave the group: wait at most linger_seconds until the others have read what this rank published, and free all. */
ACCELZ_API void accelz_channel_close(accelz_channel *channel, double linger_seconds);

#ifdef __cplusplus
}
#endif
