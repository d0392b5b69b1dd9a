//! Collectives through host memory: every rank gets the bytes of all ranks and computes the result itself.
//!
//! Sums are added in rank order in f64 and rounded to f32, and to the format of their tensor, so every rank gets the same bits.
//! Trade-off: every rank receives everything and waits for the device, which is exact and simple but does not scale.

use std::sync::Arc;

use burn_tensor::{Tensor, TensorData, backend::Backend};

use super::{CommError, Communicator};
use crate::payload::{Loan, Payload};

const VALUE: usize = size_of::<f32>();

/// Implements [`Communicator::all_reduce_sum`].
pub(super) fn all_reduce_sum<B: Backend>(
    ranks: &Communicator,
    tensors: Vec<Tensor<B, 1>>,
) -> Result<Vec<Tensor<B, 1>>, CommError> {
    if ranks.world_size() == 1 {
        return Ok(tensors);
    }
    let own: Vec<u8> = tensors.iter().flat_map(|tensor| bytes(tensor.clone())).collect();
    let expected = own.len();
    let sum = sum_of(gathered(ranks, "all_reduce_sum", own, |_| expected)?.iter().map(|sent| &sent[..]));
    let mut start = 0;
    let part = |tensor: Tensor<B, 1>| {
        let [length] = tensor.dims();
        start += length;
        like(&tensor, &sum[start - length..start])
    };
    Ok(tensors.into_iter().map(part).collect())
}

/// Implements [`Communicator::start_broadcast`] and [`Communicator::broadcast_each`], in one exchange: each rank sends the payloads of which it is the root.
pub(super) fn broadcast_payloads<B: Backend>(
    ranks: &Communicator,
    loans: Vec<Loan<B>>,
    device: &B::Device,
) -> Result<Vec<Payload<B>>, CommError> {
    let of_rank = |rank: usize| loans.iter().filter(move |loan| loan.root == rank);
    let payload = |loan: &Loan<B>| loan.own.clone().expect("a payload is on its root");
    if ranks.world_size() == 1 {
        return Ok(loans.iter().map(payload).collect());
    }
    let own: Vec<u8> = of_rank(ranks.rank()).flat_map(|loan| payload(loan).to_bytes()).collect();
    let expected = |rank| of_rank(rank).map(|loan| loan.layout.bytes()).sum();
    let gathered = gathered(ranks, "broadcast_payloads", own, expected)?;
    let mut rest: Vec<&[u8]> = gathered.iter().map(|sent| &sent[..]).collect();
    let next = |loan: &Loan<B>| {
        let (part, after) = rest[loan.root].split_at(loan.layout.bytes());
        rest[loan.root] = after;
        if loan.root == ranks.rank() { payload(loan) } else { Payload::from_bytes(part, loan.layout, device) }
    };
    Ok(loans.iter().map(next).collect())
}

/// Implements [`Communicator::start_reduce`], in one exchange: each rank sums only the tensors of which it is the root.
pub(super) fn reduce_each<B: Backend>(
    ranks: &Communicator,
    tensors: Vec<(Tensor<B, 1>, usize)>,
) -> Result<Vec<Tensor<B, 1>>, CommError> {
    if ranks.world_size() == 1 {
        return Ok(tensors.into_iter().map(|(tensor, _)| tensor).collect());
    }
    let own: Vec<u8> = tensors.iter().flat_map(|(tensor, _)| bytes(tensor.clone())).collect();
    let expected = own.len();
    let gathered = gathered(ranks, "reduce_each", own, |_| expected)?;
    let mut end = 0;
    let sum = |(tensor, root): (Tensor<B, 1>, usize)| {
        let start = end;
        end += VALUE * tensor.dims()[0];
        if root != ranks.rank() {
            return tensor;
        }
        like(&tensor, &sum_of(gathered.iter().map(|sent| &sent[start..end])))
    };
    Ok(tensors.into_iter().map(sum).collect())
}

/// Returns the bytes of every rank, which must be as many as expected of it.
fn gathered(
    ranks: &Communicator,
    operation: &'static str,
    own: Vec<u8>,
    expected: impl Fn(usize) -> usize,
) -> Result<Vec<Arc<[u8]>>, CommError> {
    let gathered = ranks.all_gather_bytes(operation, own)?;
    for (rank, sent) in gathered.iter().enumerate() {
        let (expected, got) = (expected(rank), sent.len());
        if got != expected {
            return Err(CommError::Mismatch { rank, operation, expected, got });
        }
    }
    Ok(gathered)
}

/// Sums the ranks' f32 values in f64, in this order.
fn sum_of<'a>(of_ranks: impl Iterator<Item = &'a [u8]>) -> Vec<f32> {
    let mut sums = Vec::new();
    for bytes in of_ranks {
        sums.resize(bytes.len() / VALUE, 0.0f64);
        sums.iter_mut().zip(values(bytes)).for_each(|(sum, value)| *sum += f64::from(value));
    }
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// Creates a tensor of these values in the format of another one.
fn like<B: Backend>(tensor: &Tensor<B, 1>, values: &[f32]) -> Tensor<B, 1> {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(tensor.dtype());
    Tensor::from_data(data, (&tensor.device(), tensor.dtype()))
}

fn bytes<B: Backend>(tensor: Tensor<B, 1>) -> Vec<u8> {
    let data: TensorData = tensor.into_data().convert::<f32>();
    data.as_bytes().to_vec()
}

fn values(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<VALUE>().0.iter().map(|value| f32::from_ne_bytes(*value))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_tensor::DType;

    use super::*;
    use crate::testing::{Plain, random};

    const LENGTH: usize = 11;

    fn on_all_ranks<T: Send>(world_size: usize, work: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
        let results = crate::comm::local::tests::on_all_ranks(world_size, |ranks| work(&ranks));
        results.into_iter().map(Result::unwrap).collect()
    }

    fn host(tensor: Tensor<Plain, 1>) -> Vec<f32> {
        tensor.into_data().to_vec().unwrap()
    }

    fn of_rank(rank: usize) -> Tensor<Plain, 1> {
        random(rank as u64, [LENGTH])
    }

    /// Returns the sum over ranks, added in rank order in f64.
    fn expected_sum(world_size: usize) -> Vec<f32> {
        let of_rank: Vec<Vec<f32>> = (0..world_size).map(|rank| host(of_rank(rank))).collect();
        (0..LENGTH).map(|index| of_rank.iter().map(|values| f64::from(values[index])).sum::<f64>() as f32).collect()
    }

    #[test]
    fn a_sum_has_the_same_bits_on_every_rank() {
        for world_size in [1, 2, 3, 8] {
            let results = on_all_ranks(world_size, |ranks| {
                let tensor = of_rank(ranks.rank());
                let halves = vec![tensor.clone().narrow(0, 0, 4), tensor.narrow(0, 4, LENGTH - 4)];
                host(Tensor::cat(all_reduce_sum(ranks, halves).unwrap(), 0))
            });
            assert!(results.iter().all(|result| *result == expected_sum(world_size)));
        }
    }

    #[test]
    fn sums_of_bf16_are_rounded_once_and_stay_in_bf16() {
        let narrow = |rank| of_rank(rank).cast(DType::BF16);
        let terms = (0..3).map(|rank| host(narrow(rank).cast(DType::F32)));
        let expected = terms.reduce(|sum, term| sum.iter().zip(term).map(|(a, b)| a + b).collect()).unwrap();
        let expected = Tensor::<Plain, 1>::from_floats(expected.as_slice(), &Default::default()).cast(DType::BF16);
        let results = on_all_ranks(3, |ranks| {
            let all = all_reduce_sum(ranks, vec![narrow(ranks.rank())]).unwrap().remove(0);
            let each = reduce_each(ranks, (0..3).map(|root| (narrow(ranks.rank()), root)).collect()).unwrap();
            [all.into_data(), each[ranks.rank()].to_data()]
        });
        assert!(results.iter().flatten().all(|sum| *sum == expected.to_data()));
    }

    #[test]
    fn payloads_of_every_format_arrive_as_they_are_on_their_root() {
        let device = Default::default();
        let of_rank = |rank: usize| -> Vec<Payload<Plain>> {
            let codes = TensorData::new(vec![rank as u8, 255, 7], [3]);
            let codes = Tensor::from_data(codes, (&device, DType::U8));
            let half = random::<Plain, 1>(rank as u64, [5]).cast(DType::BF16);
            vec![Payload::Values(self::of_rank(rank)), Payload::Codes(codes), Payload::Values(half)]
        };
        let roots = [2, 0, 2];
        let results = on_all_ranks(3, |ranks| {
            let own = of_rank(ranks.rank());
            let loan = |(payload, root): (Payload<Plain>, usize)| {
                let layout = payload.layout();
                Loan { root, layout, own: (root == ranks.rank()).then_some(payload) }
            };
            let loans = own.into_iter().zip(roots).map(loan).collect();
            broadcast_payloads(ranks, loans, &device).unwrap().iter().map(Payload::to_bytes).collect::<Vec<_>>()
        });
        let expected: Vec<Vec<u8>> =
            roots.iter().enumerate().map(|(index, &root)| of_rank(root)[index].to_bytes()).collect();
        assert!(results.iter().all(|result| *result == expected));
    }

    #[test]
    fn each_root_gets_the_sum_of_its_own_tensors() {
        let results = on_all_ranks(3, |ranks| {
            let tensor = || of_rank(ranks.rank());
            let sums = reduce_each(ranks, vec![(tensor(), 2), (tensor(), 0), (tensor(), 1)]).unwrap();
            host(sums[(ranks.rank() + 1) % 3].clone())
        });
        assert!(results.iter().all(|result| *result == expected_sum(3)));
    }

    #[test]
    fn ranks_that_send_other_sizes_get_an_error() {
        let results = on_all_ranks(2, |ranks| {
            let tensor: Tensor<Plain, 1> = random(1, [4 + ranks.rank()]);
            all_reduce_sum(ranks, vec![tensor]).expect_err("the sizes differ")
        });
        let mismatch = |rank, expected, got| CommError::Mismatch { rank, operation: "all_reduce_sum", expected, got };
        assert_eq!(results, [mismatch(1, 16, 20), mismatch(0, 20, 16)]);
    }
}
