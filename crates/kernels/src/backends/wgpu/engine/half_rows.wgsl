// A copy in float16 of rows that a workgroup each has written to `y`, divided by a power of two that follows from the row's largest value.
@binding(_) var<storage, read_write> halves: array<f16>;
@binding(_) var<storage, read_write> powers: array<f32>;
#use largest

// Rows are padded to {PADDED_ROWS}, columns to {PADDED_COLUMNS}, with zeros. A thread has read and written the columns of `thread` + a multiple of THREADS.
fn put_half(thread: u32, row: u32, rows: u32, width: u32, largest: f32) {
    if (row >= (rows + {PADDED_ROWS}u - 1u) / {PADDED_ROWS}u * {PADDED_ROWS}u) { return; }
    let power = power_of(largest_of(thread, largest));
    let padded = (width + {PADDED_COLUMNS}u - 1u) / {PADDED_COLUMNS}u * {PADDED_COLUMNS}u;
    if (thread == 0u) { powers[row] = power; }
    for (var i = thread; i < padded; i += THREADS) {
        var value = 0.0;
        if (row < rows && i < width) { value = y[row * width + i] / power; }
        halves[row * padded + i] = f16(value);
    }
}
