// TransformerEngine's fused_rope.cu as published, with the three functions of its C interface that handle tensors.
//
// SOURCE: the published file.
#include SOURCE

using transformer_engine::Tensor;

NVTETensor nvte_create_tensor(NVTEScalingMode) { return reinterpret_cast<NVTETensor>(new Tensor()); }

void nvte_destroy_tensor(NVTETensor tensor) { delete reinterpret_cast<Tensor *>(tensor); }

void nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam, const void *value, size_t) {
  const auto *given = static_cast<const NVTEBasicTensor *>(value);
  auto &data = reinterpret_cast<Tensor *>(tensor)->data;
  data.dptr = given->data_ptr;
  data.dtype = static_cast<transformer_engine::DType>(given->dtype);
  data.shape.assign(given->shape.data, given->shape.data + given->shape.ndim);
}
