// The index of packed documents for cuDNN, computed where it is read.
//
// Does not depend on T. Trade-off: one block, since there are few documents.

struct Strides {
    int of[MAX_STRIDES];
};

// Lengths and offsets of packed documents as cuDNN takes them: the lengths of `most` documents (0 after the last one), then
// for each of `strides` row strides the offset of every document and of the end, times that stride. Each list starts on a
// multiple of four values. boundaries [documents + 1] are counted from the first.
// grid (1), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) packed_index(int *index, const int *boundaries, int documents, int most, int strides,
                                           Strides stride) {
    const int lengths = (most + 3) / 4 * 4, offsets = (most + 4) / 4 * 4;
    for (int at = threadIdx.x; at < lengths; at += 256)
        index[at] = at < documents ? boundaries[at + 1] - boundaries[at] : 0;
    for (int part = 0; part < strides; ++part) {
        int *list = index + lengths + part * offsets;
        for (int at = threadIdx.x; at < offsets; at += 256)
            list[at] = at <= most ? (boundaries[min(at, documents)] - boundaries[0]) * stride.of[part] : 0;
    }
}
