// Graphs: made by a capture or node by node, instantiated, replayed; and the objects that they keep.
//
// Not played: updates of instantiated graphs, a launch into a capture, nodes that allocate, memory and host nodes made one by one.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <unordered_map>

#include "handles.h"

using namespace played;

struct CUuserObject_st {
  void* object;
  CUhostFn destroy;
  int count;
};

struct CUgraphExec_st {
  struct Step {
    Work work;
    std::vector<size_t> after;
  };
  std::vector<Step> steps;  // each behind those that it comes after
  std::map<CUuserObject, int> kept;
  unsigned long long flags = 0;
  OpRef last;
};

namespace {

using Nodes = std::vector<CUgraphNode>;

void release(CUuserObject object, int count) {
  if ((object->count -= count) > 0) return;
  object->destroy(object->object);
  delete object;
}

// As CUDA returns lists: their length, and as many entries as there is room for.
CUresult give(const Nodes& from, CUgraphNode* to, size_t* count) {
  if (to != nullptr) std::copy_n(from.begin(), std::min(from.size(), *count), to);
  *count = from.size();
  return CUDA_SUCCESS;
}

CUresult give(const Nodes& from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
  if (data != nullptr) memset(data, 0, *count * sizeof *data);
  return give(from, to, count);
}

// Nodes into steps, each after those that it depends on. A child graph stands between the steps before and behind its node.
class Flattener {
 public:
  explicit Flattener(CUgraphExec exec) : exec_(exec) {}

  // entry: what nodes without dependencies come after. Returns the steps that no other follows.
  std::vector<size_t> flatten(CUgraph graph, const std::vector<size_t>& entry) {
    std::set<size_t> leaves;
    for (const auto& node : graph->nodes) leaves.insert(place(node.get(), entry));
    for (const auto& node : graph->nodes) {
      for (CUgraphNode before : node->after) leaves.erase(places_[before]);
    }
    return {leaves.begin(), leaves.end()};
  }

 private:
  size_t place(CUgraphNode node, const std::vector<size_t>& entry) {
    const auto known = places_.find(node);
    if (known != places_.end()) return known->second;
    std::vector<size_t> after = node->after.empty() ? entry : std::vector<size_t>{};
    for (CUgraphNode before : node->after) after.push_back(place(before, entry));
    if (node->work.child != nullptr) {
      const std::vector<size_t> inner = Flattener(exec_).flatten(node->work.child, after);
      if (!inner.empty()) after = inner;
    }
    exec_->steps.push_back({node->work, after});
    return places_[node] = exec_->steps.size() - 1;
  }

  const CUgraphExec exec_;
  std::unordered_map<CUgraphNode, size_t> places_;
};

CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  const Guard guard(lock());
  auto* exec = new CUgraphExec_st;
  Flattener(exec).flatten(graph, {});
  exec->kept = graph->kept;
  exec->flags = flags;
  for (const auto& [object, count] : exec->kept) object->count += count;
  return answer(out, exec);
}

void launch(CUgraphExec exec, CUstream stream) {
  ++totals().graphs_launched;
  const OpRef begin = enqueue(stream, {}, {exec->last});  // a graph does not overlap with itself
  std::vector<OpRef> ops;
  for (const auto& step : exec->steps) {
    const CUevent event = step.work.event;
    const CUgraphNodeType type = step.work.type;
    std::vector<OpRef> after;
    for (const size_t before : step.after) after.push_back(ops[before]);
    if (after.empty()) after.push_back(begin);
    if (type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && exists(event)) after.push_back(event->op);
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) note_kernel(step.work.name);
    Work work = step.work;
    work.queues = false;
    ops.push_back(add(stream->context->device, std::move(work), std::move(after), true));
    if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD && exists(event)) {
      event->op = ops.back();
      event->capture = 0;
    }
  }
  exec->last = enqueue(stream, {}, std::move(ops));
}

CUresult add_node(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count, Work work) {
  const Guard guard(lock());
  const Nodes before = count == 0 ? Nodes{} : Nodes(after, after + count);
  graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{graph, std::move(work), before, false}));
  return answer(out, graph->nodes.back().get());
}

CUresult add_event_node(CUgraphNodeType type, CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count, CUevent event) {
  Work work;
  work.type = type;
  work.event = event;
  return add_node(out, graph, after, count, std::move(work));
}

}  // namespace

CUgraph_st::~CUgraph_st() {
  for (const auto& [object, count] : kept) release(object, count);
}

// -- graphs and their nodes

CUresult cuGraphCreate(CUgraph* out, unsigned) {
  return play(__func__, [&] { return answer(out, new CUgraph_st); });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return play(__func__, [&] {
    delete graph;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    Nodes all;
    for (const auto& node : graph->nodes) all.push_back(node.get());
    return give(all, nodes, count);
  });
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    Nodes all;
    for (const auto& node : graph->nodes) {
      if (node->after.empty()) all.push_back(node.get());
    }
    return give(all, nodes, count);
  });
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data, size_t* count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    Nodes froms, tos;
    for (const auto& node : graph->nodes) {
      for (CUgraphNode before : node->after) {
        froms.push_back(before);
        tos.push_back(node.get());
      }
    }
    size_t room = *count;
    give(froms, from, data, &room);
    return give(tos, to, count);
  });
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* out) {
  return play(__func__, [&] { return answer(out, node->work.type); });
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    return give(node->after, nodes, data, count);
  });
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* data, size_t* count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    Nodes all;
    for (const auto& other : node->graph->nodes) {
      if (std::count(other->after.begin(), other->after.end(), node) != 0) all.push_back(other.get());
    }
    return give(all, nodes, data, count);
  });
}

CUresult cuGraphAddDependencies_v2(CUgraph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData*, size_t count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    for (size_t i = 0; i < count; ++i) to[i]->after.push_back(from[i]);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return cuGraphAddDependencies_v2(graph, from, to, nullptr, count);
}

CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count) {
  return play(__func__, [&] { return add_node(out, graph, after, count, {}); });
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count, CUevent event) {
  return play(__func__, [&] { return add_event_node(CU_GRAPH_NODE_TYPE_EVENT_RECORD, out, graph, after, count, event); });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count, CUevent event) {
  return play(__func__, [&] { return add_event_node(CU_GRAPH_NODE_TYPE_WAIT_EVENT, out, graph, after, count, event); });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count, CUgraph child) {
  return play(__func__, [&] {
    Work work;
    work.type = CU_GRAPH_NODE_TYPE_GRAPH;
    work.child = child;
    return add_node(out, graph, after, count, std::move(work));
  });
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* out) {
  return play(__func__, [&] { return answer(out, node->work.kernel); });
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned) {
  return play(__func__, [&] {
    FILE* file = fopen(path, "we");
    if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
    const Guard guard(lock());
    fprintf(file, "digraph {\n");
    for (const auto& node : graph->nodes) {
      const void* const to = node.get();
      fprintf(file, "\"%p\" [label=\"%s\"]\n", to, node->work.name.c_str());
      for (const void* from : node->after) fprintf(file, "\"%p\" -> \"%p\"\n", from, to);
    }
    fprintf(file, "}\n");
    fclose(file);
    return CUDA_SUCCESS;
  });
}

// -- instantiated graphs

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  return play(__func__, [&] { return instantiate(out, graph, flags); });
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  return play(__func__, [&] {
    params->hErrNode_out = nullptr;
    params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return instantiate(out, graph, params->flags);
  });
}

CUresult cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode*, char*, size_t) {
  return play(__func__, [&] { return instantiate(out, graph, 0); });
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t* out) {
  return play(__func__, [&] { return answer(out, exec->flags); });
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  return play(__func__, [&] {
    const Guard guard(lock());
    for (const auto& [object, count] : exec->kept) release(object, count);
    delete exec;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle) {
  return play(__func__, [&] {
    return with_stream(handle, [&](CUstream stream) {
      if (stream->capture != nullptr) {
        note_missing("cuGraphLaunch into a capture");
        return CUDA_ERROR_NOT_SUPPORTED;
      }
      launch(exec, stream);
      return CUDA_SUCCESS;
    });
  });
}

// -- objects that graphs keep

CUresult cuUserObjectCreate(CUuserObject* out, void* object, CUhostFn destroy, unsigned count, unsigned) {
  return play(__func__, [&] { return answer(out, new CUuserObject_st{object, destroy, static_cast<int>(count)}); });
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    object->count += static_cast<int>(count);
    return CUDA_SUCCESS;
  });
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    release(object, static_cast<int>(count));
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  return play(__func__, [&] {
    const Guard guard(lock());
    graph->kept[object] += static_cast<int>(count);
    if ((flags & CU_GRAPH_USER_OBJECT_MOVE) == 0) object->count += static_cast<int>(count);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
  return play(__func__, [&] {
    const Guard guard(lock());
    graph->kept[object] -= static_cast<int>(count);
    release(object, static_cast<int>(count));
    return CUDA_SUCCESS;
  });
}
