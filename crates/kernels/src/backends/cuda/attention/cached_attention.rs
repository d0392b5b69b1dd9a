//! Generation on CUDA: stores keys and values in place, computes attention of new tokens over them, and finds the most
//! probable token. Kernels: `store_rows.cu`, `cached_attention.cu`.
//!
//! Each block computes one token and key/value head; if that leaves multiprocessors idle, the keys of each query are
//! split into parts that a second launch combines. If each sequence has one new token, attention stores its key and value itself.
//! Trade-off: head widths that are not a multiple of 16, of 32 above 256, or that are above 512, use the reference body.

use burn_tensor::{DType, Int, Tensor};
use firebrick_arch::AttentionSpec;

use super::matmul;
use crate::attention::reference;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, FlashVariant, MatrixView, ScratchSlot, SoftCap, Source, arguments, cached_queries,
    cached_threads, grid, grid_of, int_tensor, tensor,
};
use crate::{CachedTokens, KvCache, Qkv, Sinks};

/// Minimum keys per block of a split.
const MIN_PART_KEYS: usize = 128;
/// Keys that a warp takes at a time; parts begin with them, but for a window's.
const TILE_KEYS: usize = 16;
/// Visible keys are counted in steps of this size, or of half of it while there are no more.
const SEEN_STEP: usize = 256;
const THREADS_PER_MULTIPROCESSOR: usize = 512;
/// Columns after each row of the output, for `x Aᵀ` of adapters that read it: those of the usual ranks need no copy then.
const ADAPTER_ROOM: usize = 64;

/// Rounds up a number of keys, since launches with the same arguments as for the token before are cheaper.
fn counted(keys: usize) -> usize {
    keys.next_multiple_of(if keys <= SEEN_STEP / 2 { SEEN_STEP / 2 } else { SEEN_STEP })
}

impl Device {
    pub(super) fn store_in_cache(
        &self,
        cache: &mut KvCache<Cuda>,
        k: Tensor<Cuda, 2>,
        v: Tensor<Cuda, 2>,
        tokens: &CachedTokens<Cuda>,
    ) {
        let (k, v, rows) = (self.matrix(k), self.matrix(v), self.int_matrix(tokens.places.clone()));
        cache.replace(|stored| {
            let [keys, values] = [0, 1].map(|part: usize| self.matrix(stored[part].clone()));
            assert!(keys.stride == keys.width && values.stride == values.width, "the rows of a cache lie without gaps");
            assert!(k.width == keys.width && k.dtype == keys.dtype && k.count() == v.count(), "keys of one width");
            let launch = Source::StoreRows.launch(k.dtype, "store_rows", grid(k.rows, 256), 4 * k.bytes());
            let arguments = arguments! {
                keys: rows(&keys), values: rows(&values), k: rows(&k), v: rows(&v), k_stride: long(k.stride),
                v_stride: long(v.stride), rows: rows(&rows), width: int(k.width),
            };
            // SAFETY: k and v are [n, width] at their strides, rows begins with an index of each below the rows of the caches, which have the
            // same width, no gaps, and no other handle.
            unsafe { self.launch(launch, &arguments) };
            stored
        });
    }

    /// Stores new keys and values, and computes attention of their tokens over the cache.
    pub(crate) fn cached_attention(
        &self,
        Qkv { q, k, v }: Qkv<Cuda>,
        sinks: Option<&Sinks<Cuda>>,
        cache: &mut KvCache<Cuda>,
        tokens: &CachedTokens<Cuda>,
        spec: &AttentionSpec,
    ) -> Tensor<Cuda, 2> {
        let multiple = if spec.head_dim > 256 { 32 } else { 16 };
        if !spec.head_dim.is_multiple_of(multiple) || spec.head_dim > 512 {
            self.store_in_cache(cache, k, v, tokens);
            return self.pause(|| reference::cached(matmul, q, sinks, cache, tokens, spec));
        }
        let has_one_each = tokens.sequences.iter().all(|new| new.count == 1);
        if !has_one_each {
            self.store_in_cache(cache, k.clone(), v.clone(), tokens);
        }
        let [keys, values] = cache.tensors().map(|stored| self.flat(stored));
        let (q, k, v) = (self.flat(q), self.flat(k), self.flat(v));
        let [new_keys, new_values] = [&k, &v].map(|new| {
            assert!(new.dtype == keys.dtype && (new.rows, new.width) == (q.rows, keys.width), "keys of one width");
            if has_one_each { new.address } else { 0 }
        });
        let places = self.int_matrix(tokens.places.clone());
        let o = self.empty_with_room([q.rows, q.width], ADAPTER_ROOM, q.dtype);
        let logits = sinks.map(|sinks| self.flat_as(sinks.logits_h.clone(), DType::F32));
        let sinks = logits.as_ref().map_or(0, |logits| logits.address);
        let queries = cached_queries(spec.head_dim);
        let blocks = spec.kv_heads * (spec.heads / spec.kv_heads).div_ceil(queries);
        let seen = spec.window.unwrap_or(usize::MAX).min(counted(tokens.longest()));
        // The split into as many blocks as run at once: a second wave would be half empty.
        let threads = cached_threads(q.dtype, spec.head_dim);
        let at_once = THREADS_PER_MULTIPROCESSOR / threads * self.multiprocessors;
        let enough = (at_once / (blocks * q.rows).max(1)).max(1);
        let part_keys = seen.div_ceil(enough).max(MIN_PART_KEYS).next_multiple_of(TILE_KEYS).min(seen.max(1));
        let splits = seen.div_ceil(part_keys);
        let parts = match splits {
            1 => 0,
            _ => {
                let values = q.rows * spec.heads * splits * (spec.head_dim + 2);
                self.scratch.take(ScratchSlot::AttentionParts, values * 4)
            }
        };
        let variant = FlashVariant { head_dim: spec.head_dim, soft_cap: spec.soft_cap.map(SoftCap::new) };
        let launch = |name, shape, bytes| Source::CachedAttention(variant).launch(q.dtype, name, shape, bytes).early();
        let shape = grid_of([blocks, q.rows, splits], threads as u32);
        let read: usize = tokens.sequences.iter().map(|new| new.count * new.all()).sum();
        let arguments = arguments! {
            o: rows(&o), parts: address(parts), q: rows(&q), keys: rows(&keys), values: rows(&values),
            new_keys: address(new_keys), new_values: address(new_values), new_keys_stride: long(k.stride),
            new_values_stride: long(v.stride), o_stride: long(o.stride), q_stride: long(q.stride), kv_stride: long(keys.stride), places: rows(&places),
            heads: int(spec.heads), kv_heads: int(spec.kv_heads),
            scale: float(spec.scale), window: int(seen), splits: int(splits), part_keys: int(part_keys),
            sinks: address(sinks),
        };
        // SAFETY: q and o are [n, heads * head_dim] and the caches [.., kv_heads * head_dim] of one format; places are those of n tokens,
        // with pages in the caches; new keys and values are null or [n, kv_heads * head_dim] of the same format, one for each sequence, so that no
        // two blocks store in one place; the parts have room for all of them; sinks are null or have an f32 per head.
        unsafe { self.launch(launch("cached_attention", shape, 2 * read * keys.width * q.dtype.size()), &arguments) };
        if splits > 1 {
            let shape = grid_of([spec.heads, o.rows, 1], 128);
            let arguments = arguments! {
                o: rows(&o), parts: address(parts), o_stride: long(o.stride), heads: int(spec.heads),
                splits: int(splits), sinks: address(sinks),
            };
            // SAFETY: the parts were written by the launch before; the others are as above.
            unsafe { self.launch(launch("cached_attention_combine", shape, 2 * o.bytes()), &arguments) };
        }
        tensor(o.tensor)
    }

    pub(crate) fn most_probable(&self, logits: &MatrixView) -> Tensor<Cuda, 1, Int> {
        let ids = self.empty([logits.rows], DType::I32);
        let launch = Source::StoreRows.launch(logits.dtype, "most_probable", grid(logits.rows, 1024), logits.bytes());
        let arguments = arguments! {
            ids: address(self.address(&ids)), logits: rows(logits), stride: long(logits.stride),
            width: int(logits.width),
        };
        // SAFETY: logits are rows of this dtype at their stride, and ids have an i32 for each.
        unsafe { self.launch(launch, &arguments) };
        int_tensor(ids)
    }
}
