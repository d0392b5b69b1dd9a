// The largest value of a workgroup of THREADS threads, and the power of two by which it becomes a number near 16,384.
var<workgroup> most: array<f32, THREADS>;

fn largest_of(thread: u32, value: f32) -> f32 {
    most[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { most[thread] = max(most[thread], most[thread + half]); }
        workgroupBarrier();
    }
    return most[0];
}

// The exponent by bits, so that the division is exact.
fn power_of(largest: f32) -> f32 {
    let exponent = (bitcast<u32>(largest) >> 23u) & 255u;
    return bitcast<f32>((clamp(exponent, 14u, 254u) - 13u) << 23u);
}
