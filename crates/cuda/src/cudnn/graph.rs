//! An operation graph under construction: tensors and operations, each finalized when it is added, so that an error names it.
//!
//! All tensors have four dimensions. Virtual tensors exist only inside a kernel; all others are bound to device memory or to a
//! scalar on the host when the plan runs.

use super::descriptor::Descriptor;
use super::sys::{Attribute, Data, Kind, Pointwise, Raw, Reduction, Symbols, Type};
use crate::error::CudaError;

/// The alignment of every bound tensor in bytes, as required by the tensor core kernels.
pub(super) const ALIGNMENT: u64 = 16;

/// Sizes or strides in elements, outermost first: documents, heads, tokens, width of a head.
pub(super) type Four = [i64; 4];

/// A tensor of a [`Graph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(usize);

/// The data to which a bound tensor is bound when the plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Query,
    Key,
    Value,
    Output,
    Statistics,
    OutputGradient,
    QueryGradient,
    KeyGradient,
    ValueGradient,
    /// Byte offset in the index of packed documents.
    Index(usize),
    /// Byte offset in the workspace.
    Workspace(usize),
    /// Scale of the scores, on the host.
    Scale,
    /// 1, on the host.
    One,
    /// The value of masked scores, on the host.
    Masked,
}

/// The element type and layout of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) element: Data,
    pub(super) sizes: Four,
    pub(super) strides: Four,
    /// Offsets of the documents in elements, for packed documents.
    pub(super) ragged: Option<Node>,
}

impl Form {
    pub(super) fn new(element: Data, sizes: Four, strides: Four) -> Self {
        Self { element, sizes, strides, ragged: None }
    }

    pub(super) fn ragged(self, offsets: Option<Node>) -> Self {
        Self { ragged: offsets, ..self }
    }

    /// Returns the same data with the last two dimensions exchanged.
    pub(super) fn transposed(mut self) -> Self {
        self.sizes.swap(2, 3);
        self.strides.swap(2, 3);
        self
    }
}

/// For each document, the number of rows, columns and inner elements that are not padding.
#[derive(Clone, Copy, Default)]
pub(super) struct Overrides {
    pub(super) rows: Option<Node>,
    pub(super) columns: Option<Node>,
    pub(super) inner: Option<Node>,
}

/// The graph: operations in the order in which they were added.
pub(super) struct Graph {
    symbols: Symbols,
    tensors: Vec<(Descriptor, Form)>,
    operations: Vec<Descriptor>,
    parts: Vec<Descriptor>,
    bindings: Vec<(i64, Source)>,
}

pub(super) struct FinishedGraph {
    pub(super) descriptor: Descriptor,
    /// The number of each bound tensor, and its source.
    pub(super) bindings: Vec<(i64, Source)>,
    /// Kept alive as long as the graph.
    pub(super) parts: Vec<Descriptor>,
}

impl Graph {
    pub(super) fn new(symbols: Symbols) -> Self {
        Self { symbols, tensors: Vec::new(), operations: Vec::new(), parts: Vec::new(), bindings: Vec::new() }
    }

    pub(super) fn form(&self, node: Node) -> Form {
        self.tensors[node.0].1
    }

    /// Adds a tensor in device memory.
    pub(super) fn device(&mut self, name: &str, form: Form, source: Source) -> Result<Node, CudaError> {
        self.tensor(name, form, Some(source))
    }

    /// Adds a tensor inside the kernel.
    pub(super) fn inner(&mut self, name: &str, form: Form) -> Result<Node, CudaError> {
        self.tensor(name, form, None)
    }

    /// Adds an f32 that is passed by value.
    pub(super) fn scalar(&mut self, name: &str, source: Source) -> Result<Node, CudaError> {
        self.tensor(name, Form::new(Data::Float, [1; 4], [1; 4]), Some(source))
    }

    /// Adds a tensor that is inside the kernel if it has no source.
    fn tensor(&mut self, name: &str, form: Form, source: Option<Source>) -> Result<Node, CudaError> {
        let node = Node(self.tensors.len());
        let number = node.0 as i64 + 1;
        let mut tensor = Descriptor::new(self.symbols, Kind::Tensor, format!("tensor {name} {form:?}"))?;
        tensor
            .data_type(Attribute::TensorDataType, form.element)?
            .integers(Attribute::TensorDimensions, &form.sizes)?
            .integers(Attribute::TensorStrides, &form.strides)?
            .integers(Attribute::TensorUniqueId, &[number])?
            .integers(Attribute::TensorByteAlignment, &[ALIGNMENT as i64])?;
        match source {
            None => _ = tensor.flag(Attribute::TensorIsVirtual)?,
            Some(Source::Scale | Source::One | Source::Masked) => _ = tensor.flag(Attribute::TensorIsByValue)?,
            Some(_) => {}
        }
        if let Some(offsets) = form.ragged {
            tensor.descriptor(Attribute::TensorRaggedOffset, &self.tensors[offsets.0].0)?;
        }
        self.tensors.push((tensor.finish()?, form));
        self.bindings.extend(source.map(|source| (number, source)));
        Ok(node)
    }

    /// Adds `y = x op b`, computed in f32; returns a new inner tensor with the sizes of `x`.
    pub(super) fn binary(&mut self, name: &str, mode: Pointwise, x: Node, b: Node) -> Result<Node, CudaError> {
        let y = self.inner(name, Form { element: Data::Float, ..self.form(x).ragged(None) })?;
        self.pointwise(name, mode, Data::Float, &[x, b], y)?;
        Ok(y)
    }

    /// Adds `y = op x`, computed in f32; returns a new inner tensor with the sizes of `x`.
    pub(super) fn unary(&mut self, name: &str, mode: Pointwise, x: Node) -> Result<Node, CudaError> {
        let y = self.inner(name, Form { element: Data::Float, ..self.form(x).ragged(None) })?;
        self.pointwise(name, mode, Data::Float, &[x], y)?;
        Ok(y)
    }

    /// Selects `x` where `keep` is true, else `otherwise`.
    pub(super) fn select(&mut self, name: &str, x: Node, otherwise: Node, keep: Node) -> Result<Node, CudaError> {
        let y = self.inner(name, Form { element: Data::Float, ..self.form(x) })?;
        self.pointwise(name, Pointwise::Select, Data::Float, &[x, otherwise, keep], y)?;
        Ok(y)
    }

    /// Compares `x op b` for each element.
    pub(super) fn compare(&mut self, name: &str, mode: Pointwise, x: Node, b: Node) -> Result<Node, CudaError> {
        let y = self.inner(name, Form { element: Data::Boolean, ..self.form(x) })?;
        self.pointwise(name, mode, Data::Boolean, &[x, b], y)?;
        Ok(y)
    }

    /// Returns the position along `axis` of each element of `x`, counted within its document.
    pub(super) fn position(&mut self, name: &str, x: Node, axis: i64, compute: Data) -> Result<Node, CudaError> {
        let y = self.inner(name, Form { element: Data::Int32, ..self.form(x) })?;
        self.operation_pointwise(name, Pointwise::Index, compute, Some(axis), &[x], y)?;
        Ok(y)
    }

    /// Adds an elementwise operation of one to three inputs into an existing tensor.
    pub(super) fn pointwise(
        &mut self,
        name: &str,
        mode: Pointwise,
        compute: Data,
        inputs: &[Node],
        y: Node,
    ) -> Result<(), CudaError> {
        self.operation_pointwise(name, mode, compute, None, inputs, y)
    }

    fn operation_pointwise(
        &mut self,
        name: &str,
        mode: Pointwise,
        compute: Data,
        axis: Option<i64>,
        inputs: &[Node],
        y: Node,
    ) -> Result<(), CudaError> {
        let mut what = Descriptor::new(self.symbols, Kind::Pointwise, format!("{mode:?} of {name}"))?;
        what.choice(Attribute::PointwiseMode, Type::PointwiseMode, mode as i32)?
            .data_type(Attribute::PointwiseMathPrecision, compute)?;
        if let Some(axis) = axis {
            what.integers(Attribute::PointwiseAxis, &[axis])?;
        }
        let what = what.finish()?;
        let mut operation = self.operation(Kind::OperationPointwise, name)?;
        operation.descriptor(Attribute::OperationPointwiseDescriptor, &what)?;
        let ports = [Attribute::OperationPointwiseX, Attribute::OperationPointwiseB, Attribute::OperationPointwiseT];
        for (&port, &input) in ports.iter().zip(inputs) {
            operation.descriptor(port, &self.tensors[input.0].0)?;
        }
        operation.descriptor(Attribute::OperationPointwiseY, &self.tensors[y.0].0)?;
        self.add(operation, Some(what))
    }

    /// Adds `c = a b`, accumulated in f32. `b` may have fewer heads than `a`; each is then used for a group of heads of `a`.
    pub(super) fn matmul(
        &mut self,
        name: &str,
        a: Node,
        b: Node,
        c: Node,
        overrides: Overrides,
    ) -> Result<(), CudaError> {
        let mut what = Descriptor::new(self.symbols, Kind::Matmul, format!("matmul of {name}"))?;
        what.data_type(Attribute::MatmulComputeType, Data::Float)?;
        let what = what.finish()?;
        let mut operation = self.operation(Kind::OperationMatmul, name)?;
        operation.descriptor(Attribute::OperationMatmulDescriptor, &what)?;
        let ports = [
            (Attribute::OperationMatmulA, Some(a)),
            (Attribute::OperationMatmulB, Some(b)),
            (Attribute::OperationMatmulC, Some(c)),
            (Attribute::OperationMatmulRowsOverride, overrides.rows),
            (Attribute::OperationMatmulColumnsOverride, overrides.columns),
            (Attribute::OperationMatmulInnerOverride, overrides.inner),
        ];
        for (port, node) in ports {
            if let Some(node) = node {
                operation.descriptor(port, &self.tensors[node.0].0)?;
            }
        }
        self.add(operation, Some(what))
    }

    /// Reduces `x` into `y` along the dimensions in which `y` is smaller.
    pub(super) fn reduce(&mut self, name: &str, how: Reduction, x: Node, y: Node) -> Result<(), CudaError> {
        let mut what = Descriptor::new(self.symbols, Kind::Reduction, format!("{how:?} of {name}"))?;
        what.data_type(Attribute::ReductionComputeType, Data::Float)?.choice(
            Attribute::ReductionOperator,
            Type::ReductionOperator,
            how as i32,
        )?;
        let what = what.finish()?;
        let mut operation = self.operation(Kind::OperationReduction, name)?;
        operation
            .descriptor(Attribute::OperationReductionDescriptor, &what)?
            .descriptor(Attribute::OperationReductionX, &self.tensors[x.0].0)?
            .descriptor(Attribute::OperationReductionY, &self.tensors[y.0].0)?;
        self.add(operation, Some(what))
    }

    /// Adds another view of `x`, as a new inner tensor.
    pub(super) fn view(&mut self, name: &str, x: Node, form: Form) -> Result<Node, CudaError> {
        let y = self.inner(name, form)?;
        let mut operation = self.operation(Kind::OperationReshape, name)?;
        operation
            .descriptor(Attribute::OperationReshapeX, &self.tensors[x.0].0)?
            .descriptor(Attribute::OperationReshapeY, &self.tensors[y.0].0)?;
        self.add(operation, None)?;
        Ok(y)
    }

    fn operation(&self, kind: Kind, name: &str) -> Result<Descriptor, CudaError> {
        Descriptor::new(self.symbols, kind, format!("operation {name}"))
    }

    fn add(&mut self, operation: Descriptor, part: Option<Descriptor>) -> Result<(), CudaError> {
        self.operations.push(operation.finish()?);
        self.parts.extend(part);
        Ok(())
    }

    /// Finishes the graph, for the device of `handle`.
    ///
    /// # Safety
    /// `handle` must be live and used by no other thread.
    pub(super) unsafe fn finish(mut self, handle: Raw) -> Result<FinishedGraph, CudaError> {
        let mut graph = Descriptor::new(self.symbols, Kind::OperationGraph, "the operation graph")?;
        // SAFETY: the handle is the caller's promise.
        unsafe { graph.handle(Attribute::OperationGraphHandle, handle)? };
        graph.descriptors(Attribute::OperationGraphOperations, &self.operations)?;
        let descriptor = graph.finish()?;
        let mut parts = self.operations;
        parts.append(&mut self.parts);
        parts.extend(self.tensors.into_iter().map(|(tensor, _)| tensor));
        Ok(FinishedGraph { descriptor, bindings: self.bindings, parts })
    }
}
