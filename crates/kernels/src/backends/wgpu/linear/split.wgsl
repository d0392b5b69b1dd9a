// c = the sum of the pieces of a product whose inner dimension was split [+ add].
struct P { m: u32, n: u32, pieces: u32, c_row: u32, c_at: u32, add_row: u32, add_at: u32 }
var<immediate> p: P;
@binding(_) var<storage, READ> pieces: array<f32>;
#if ADD
@binding(_) var<storage, READ> add: array<f32>;
#end
@binding(_) var<storage, read_write> c: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let i = (group.x + group.y * 65535u) * 256u + thread;
    if (i >= p.m * p.n) { return; }
    let row = i / p.n;
    let column = i % p.n;
    var value = 0.0;
    for (var piece = 0u; piece < p.pieces; piece++) { value += pieces[piece * p.m * p.n + i]; }
#if ADD
    value += add[p.add_at + row * p.add_row + column];
#end
    c[p.c_at + row * p.c_row + column] = value;
}
