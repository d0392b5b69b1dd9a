// Instructions of the matrix units and the copies that feed them, for products of 16-bit T with f32 sums: mma.sync m16n8k16, ldmatrix,
// cp.async. Before sm_80 there is f16 alone, by two mma.sync m16n8k8, and copies go through registers. Lane layouts are those of the
// PTX ISA, "Matrix Fragments for mma.m16n8k16" and "for mma.m16n8k8".
// Trade-off: Hopper's own, faster products (wgmma) are left to the libraries.

typedef unsigned Word; // two 16-bit values, or an address in shared memory

DEVICE Word shared_address(const void *pointer) { return static_cast<Word>(__cvta_generic_to_shared(pointer)); }

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(Word (&r)[4], Word address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void load_matrices_transposed(Word (&r)[4], Word address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// An 8x8 matrix of which each lane has a word.
DEVICE Word transposed(Word word) {
    Word result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// c[16, 8] += a[16, 16] b[16, 8]
DEVICE void multiply_add(float (&c)[4], const Word (&a)[4], Word b0, Word b1) {
#if T_IS_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif __CUDA_ARCH__ < 800
    // The first half of k, then the second: the fragments of m16n8k16 are those of two m16n8k8.
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%8}, {%0,%1,%2,%3};\n\t"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if __CUDA_ARCH__ < 800
// Copies of 16 and of 4 bytes to shared memory, done when they return; zeros where `inside` is false (nothing is read then).
DEVICE void copy_16(Word to, const void *from, bool inside) {
    const uint4 v = inside ? *static_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE void copy_4(Word to, const void *from, bool inside) {
    const unsigned v = inside ? *static_cast<const unsigned *>(from) : 0;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

DEVICE void copies_issued() {}
template <int GROUPS> DEVICE void wait_for_all_but() {}
DEVICE void wait_for_copies() {}
#else
// Asynchronous copies of 16 and of 4 bytes to shared memory; zeros where `inside` is false (nothing is read then).
DEVICE void copy_16(Word to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

DEVICE void copy_4(Word to, const void *from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(inside ? 4 : 0) : "memory");
}

// Closes the group of the copies issued so far.
DEVICE void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most GROUPS of this thread's groups are under way.
template <int GROUPS> DEVICE void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }

// Waits for all of this thread's copies; a barrier must follow before others' copies are read.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

DEVICE void store_chunk(Word address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

DEVICE uint4 load_chunk(Word address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

DEVICE void store_word(Word address, Word v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
