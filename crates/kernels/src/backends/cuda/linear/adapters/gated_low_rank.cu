// Gated activations together with the small products of adapters that read the same values. Compiled after gated.cu and low_rank.cu.
//
// Forward: x Aᵀ of the adapter that reads y = a(g) u. Backward: d_low and dB of the adapters of gate and up, and dA of the one that read y,
// which is computed again and never written. As passes and GEMMs of their own these read every gradient once more, and y is written for them alone.
// GATED_PIECES, a macro of the host: 2, or 1 where blocks have less shared memory.
// Trade-off: ranks up to 16; the sums of more leave no registers for the values.

static_assert(RANKS == 16, "three sums over tokens of more ranks do not fit the registers");
typedef Walk<2, 2 * GATED_PIECES, 0, 1> GatedForward;
typedef Walk<3, GATED_PIECES, 3, 2> GatedBackward;

// y [n, width]. Launch: grid (chunks, parts of the tokens); the rest as `walk` has it.
KERNEL __launch_bounds__(32 * WARPS, 1)
gated_low_rank(T *y, long long y_stride, const T *gate, const T *up, long long gate_stride, long long up_stride, float *low_parts,
               Adapters adapters, int n) {
    const Rows inputs[2] = {{gate, gate_stride}, {up, up_stride}};
    walk<GatedForward>(inputs, adapters.of, blockIdx.x, adapters, low_parts, nullptr, n,
                       [&](const Values (&in)[2], Values (&out)[1], long long row, int column, bool inside) {
                           float g[VALUES], u[VALUES];
                           in[0].unpack(g), in[1].unpack(u);
                           gated_values(g, u);
                           out[0] = Values::pack(g);
                           if (inside) out[0].store(y + row * y_stride + column);
                       });
}

// dgate, dup: rows at d_stride, may be gate and up themselves. Adapters: of gate, of up, and the one that read y. Launch: grid (chunks of
// gate, parts of the tokens); the rest as `walk` has it.
KERNEL __launch_bounds__(32 * WARPS, 1)
gated_backward_low_rank(T *dgate, T *dup, long long d_stride, const T *gate, const T *up, long long gate_stride, long long up_stride,
                        const T *dy, long long dy_stride, float *low_parts, float *parts, Adapters adapters, int n) {
    const Rows inputs[3] = {{gate, gate_stride}, {up, up_stride}, {dy, dy_stride}};
    walk<GatedBackward>(inputs, adapters.of, blockIdx.x, adapters, low_parts, parts, n,
                        [&](const Values (&in)[3], Values (&out)[3], long long row, int column, bool inside) {
                            float g[VALUES], u[VALUES], d[VALUES], product[VALUES];
                            in[0].unpack(g), in[1].unpack(u), in[2].unpack(d);
                            gated_gradients(g, u, d, product);
                            out[0] = Values::pack(g), out[1] = Values::pack(u), out[2] = Values::pack(product);
                            if (!inside) return;
                            out[0].store(dgate + row * d_stride + column);
                            out[1].store(dup + row * d_stride + column);
                        });
}
