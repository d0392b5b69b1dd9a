// Rows into a wider buffer: column ranges side by side, where they were not made there.
//
// Only moves bytes, so it does not care for T. Gives up: rows of a few bytes use few lanes.

// y[row * y_stride ..] = x[row * x_stride ..] for `bytes` bytes of each of `rows` rows; strides in bytes; no overlap.
// grid any, rows is fast; block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) copy_rows(unsigned char *y, long long y_stride, const unsigned char *x, long long x_stride,
                                        long long rows, long long bytes) {
    const bool vectors = bytes % 16 == 0 && y_stride % 16 == 0 && x_stride % 16 == 0 && aligned16(y, x);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        unsigned char *to = y + row * y_stride;
        const unsigned char *from = x + row * x_stride;
        if (vectors) {
            for (long long at = threadIdx.x; at < bytes / 16; at += 256)
                reinterpret_cast<uint4 *>(to)[at] = reinterpret_cast<const uint4 *>(from)[at];
        } else {
            for (long long at = threadIdx.x; at < bytes; at += 256) to[at] = from[at];
        }
    }
}

struct Strides {
    int of[8];
};

// Lengths and offsets of packed documents as cuDNN takes them: the lengths of `most` documents (0 behind the last one), then
// for each of `strides` row strides the offset of every document and of the end, times that stride. Each list starts on a
// multiple of four values. boundaries [documents + 1] begins with 0.
// grid (1), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) packed_index(int *index, const int *boundaries, int documents, int most, int strides,
                                           Strides stride) {
    const int lengths = (most + 3) / 4 * 4, offsets = (most + 4) / 4 * 4;
    for (int at = threadIdx.x; at < lengths; at += 256)
        index[at] = at < documents ? boundaries[at + 1] - boundaries[at] : 0;
    for (int part = 0; part < strides; ++part) {
        int *list = index + lengths + part * offsets;
        for (int at = threadIdx.x; at < offsets; at += 256)
            list[at] = at <= most ? boundaries[min(at, documents)] * stride.of[part] : 0;
    }
}
