"""The part of Triton's model_config.proto that a classifier's repository uses, as a real schema.

Names, numbers and types are those of triton-inference-server/common as of July 2026; protobuf's own
parser then refuses whatever Triton's would.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

_TYPES = descriptor_pb2.FieldDescriptorProto.Type
# Message: field, number, type; a type in capitals is an enumeration, a "*" a repeated field.
_MESSAGES = {
    "ModelInput": "name 1 string; data_type 2 DataType; dims 4 *int64",
    "ModelOutput": "name 1 string; data_type 2 DataType; dims 3 *int64; label_filename 4 string",
    "Latest": "num_versions 1 uint32",
    "ModelVersionPolicy": "latest 1 Latest",
    "ModelInstanceGroup": "name 1 string; kind 4 Kind; count 2 int32",
    "ModelDynamicBatching": "preferred_batch_size 1 *int32; max_queue_delay_microseconds 2 uint64",
    "ModelParameter": "string_value 1 string",
    "ParameterEntry": "key 1 string; value 2 ModelParameter",
    "TextEntry": "key 1 string; value 2 string",
    "Step": "model_name 1 string; model_version 2 int64; input_map 3 *TextEntry;"
    " output_map 4 *TextEntry",
    "ModelEnsembling": "step 1 *Step",
    "WarmupInput": "data_type 1 DataType; dims 2 *int64; zero_data 3 bool; random_data 4 bool;"
    " input_data_file 5 string",
    "WarmupEntry": "key 1 string; value 2 WarmupInput",
    "ModelWarmup": "name 1 string; batch_size 2 uint32; inputs 3 *WarmupEntry; count 4 uint32",
    "ModelConfig": "name 1 string; platform 2 string; backend 17 string;"
    " version_policy 3 ModelVersionPolicy; max_batch_size 4 int32; input 5 *ModelInput;"
    " output 6 *ModelOutput; instance_group 7 *ModelInstanceGroup;"
    " dynamic_batching 11 ModelDynamicBatching; ensemble_scheduling 15 ModelEnsembling;"
    " parameters 14 *ParameterEntry; model_warmup 16 *ModelWarmup",
}
_ENUMS = {
    "DataType": {"TYPE_INVALID": 0, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13},
    "Kind": {"KIND_AUTO": 0, "KIND_GPU": 1, "KIND_CPU": 2},
}


def parse_config(text: str) -> object:
    """The ModelConfig that a config.pbtxt holds; text_format.ParseError if it holds none."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
    return text_format.Parse(text, message())


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="model_config.proto", package="inference", syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for word, number in sorted(values.items(), key=lambda item: item[1]):
            enum.value.add(name=word, number=number)
    for name, described in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in described.split(";"):
            _add_field(message, *entry.split())
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: str, kind: str) -> None:
    labels = descriptor_pb2.FieldDescriptorProto.Label
    field = message.field.add(name=name, number=int(number), label=labels.LABEL_OPTIONAL)
    if kind.startswith("*"):
        field.label = labels.LABEL_REPEATED
    word = kind.lstrip("*")
    if word in _MESSAGES or word in _ENUMS:
        field.type = _TYPES.TYPE_MESSAGE if word in _MESSAGES else _TYPES.TYPE_ENUM
        field.type_name = f".inference.{word}"
    else:
        field.type = _TYPES.Value(f"TYPE_{word.upper()}")
