// c = the sum of the pieces of a product whose inner dimension was split [+ add]. HALF: also a copy in float16, each row divided by that power of two
// of A, times `scale`; it is padded with zeros.
#if HALF
enable f16;
#end
struct P { m: u32, n: u32, pieces: u32, c_row: u32, c_at: u32, add_row: u32, add_at: u32, rows: u32, width: u32, scale: f32 }
var<immediate> p: P;
@binding(_) var<storage, READ> pieces: array<f32>;
#if ADD
@binding(_) var<storage, READ> add: array<f32>;
#end
#if HALF
@binding(_) var<storage, READ> powers: array<f32>;
@binding(_) var<storage, read_write> halves: array<f16>;
#end
@binding(_) var<storage, read_write> c: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let i = (group.x + group.y * 65535u) * 256u + thread;
    if (i >= p.rows * p.width) { return; }
    let row = i / p.width;
    let column = i % p.width;
    var value = 0.0;
    if (row < p.m && column < p.n) {
        for (var piece = 0u; piece < p.pieces; piece++) { value += pieces[(piece * p.m + row) * p.n + column]; }
#if ADD
        value += add[p.add_at + row * p.add_row + column];
#end
        c[p.c_at + row * p.c_row + column] = value;
    }
#if HALF
    halves[i] = f16(value / (powers[row] * p.scale));
#end
}
