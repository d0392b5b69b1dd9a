        // Adds the products of the tiles in workgroup memory, BK of the inner dimension.
#for h in HALVES
#for i in FM
#if A_TURNED
#if EMULATED
        let a_{h}_{i} = ({h}u * 16u * TALL + sub_row + {i}u * 16u) / 4u;
#else
        let a_{h}_{i} = coopLoad<coop_mat16x16<f16, A>>(&tile_a[({h}u * 16u * TALL + sub_row + {i}u * 16u) / 4u], TALL / 4u);
#end
#else
#if EMULATED
        let a_{h}_{i} = ((sub_row + {i}u * 16u) * PITCH + {h}u * 16u) / 4u;
#else
        let a_{h}_{i} = coopLoadT<coop_mat16x16<f16, A>>(&tile_a[((sub_row + {i}u * 16u) * PITCH + {h}u * 16u) / 4u], PITCH / 4u);
#end
#end
#end
#for j in FN
#if TURNED
#if EMULATED
        let b_{h}_{j} = ({h}u * 16u * WIDE + sub_column + {j}u * 16u) / 4u;
#else
        let b_{h}_{j} = coopLoadT<coop_mat16x16<f16, B>>(&tile_b[({h}u * 16u * WIDE + sub_column + {j}u * 16u) / 4u], WIDE / 4u);
#end
#else
#if EMULATED
        let b_{h}_{j} = ((sub_column + {j}u * 16u) * PITCH + {h}u * 16u) / 4u;
#else
        let b_{h}_{j} = coopLoad<coop_mat16x16<f16, B>>(&tile_b[((sub_column + {j}u * 16u) * PITCH + {h}u * 16u) / 4u], PITCH / 4u);
#end
#end
#for i in FM
#if EMULATED
        multiply(&sum_{i}_{j}, a_{h}_{i}, b_{h}_{j}, lane, {A_TURNED}u != 0u, {TURNED}u != 0u);
#else
        sum_{i}_{j} = coopMultiplyAdd(a_{h}_{i}, b_{h}_{j}, sum_{i}_{j});
#end
#end
#end
#end
