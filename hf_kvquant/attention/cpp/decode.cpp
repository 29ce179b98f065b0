// Decode attention of one new token per row over packed codes: what hf_kvquant/attention/decode.py says, in C++.
//
// A task is a run of blocks of one KV head of one row. It goes in pieces of STEP tokens through scores, softmax (with a
// running maximum, as in FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithm 1) and values, so that nothing
// grows with the past; tasks are merged by their maxima. The algebra is that of hf_kvquant/attention/codes.py.
//
// Codes are read once for all query heads of a tile and multiplied as integers (integers.h) where the machine has
// AVX-512 VNNI and VBMI, else converted to fp32 in registers (loops.h) and multiplied with numbers that are constant
// along the vector: tokens for keys, channels for values. Keys before RoPE are dequantized and rotated in registers
// (rotated.h). Where scales of several tokens change within a block, or tokens do not lie as a tile takes them, a block
// is unpacked to the first-level cache instead.
//
// Vectors are those of GCC and Clang, 16 floats wide; narrower machines split them.

#include <memory>

#include "task.h"

extern "C" void hf_kvquant_decode(const Form* form, const Call* call) {
  // Heads that read the same angles go through the blocks together.
  const Int together = call->cos.data ? form->heads : 1, groups = form->heads / together;
  const Int splits = call->splits, runs = call->batch * groups * splits;
  const Int step = std::max<Int>(1, STEP / form->block_length);
  std::vector<std::unique_ptr<Task>> tasks(call->batch * form->heads * splits);  // by row, head and split
  std::vector<Angles> angles;
  for (Int run = 0; run < runs; ++run) angles.push_back({*form, *call, run / splits / groups});
#pragma omp parallel for schedule(dynamic) num_threads(call->threads) if (call->threads > 1)
  for (Int run = 0; run < runs; ++run) {
    const Int split = run % splits, first_head = run / splits % groups * together;
    const Int stop = call->blocks * (split + 1) / splits;
    const auto task = [&](Int head) -> std::unique_ptr<Task>& {
      return tasks[(angles[run].b * form->heads + first_head + head) * splits + split];
    };
    for (Int head = 0; head < together; ++head)
      task(head) = std::make_unique<Task>(*form, *call, angles[run], first_head + head);
    for (Int start = call->blocks * split / splits; start < stop; start += step) {
      const Int count = std::min(step, stop - start);
      angles[run].bring(start, count);
      angles[run].look_ahead(start, count, 1);
      for (Int head = 0; head < together; ++head) task(head)->score(start, count, stop);
      for (Int n = 0; form->turns_centre && n < count; ++n) {  // while the angles of a block are in the first-level cache
        const bool fixed = angles[run].fix(start + n);
        for (int index = 0; index < (fixed ? 1 : 2); ++index)
          for (Int head = 0; head < together; ++head) {
            task(head)->at_block(n);
            if (fixed) task(head)->add_fixed_centre();
            else task(head)->add_centre(start + n, index);
          }
      }
      angles[run].look_ahead(start + count, step, 0);
      for (Int head = 0; head < together; ++head) task(head)->sum_blocks(start, count, stop);
    }
    if (split == splits - 1)
      for (Int head = 0; head < together; ++head) task(head)->attend_exact();
  }
  for (size_t first = 0; first < tasks.size(); first += splits) {
    for (Int split = 1; split < splits; ++split) tasks[first]->merge(*tasks[first + split]);
    tasks[first]->write();
  }
}
