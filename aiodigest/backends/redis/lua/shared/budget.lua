-- budget: how much a call has read. Once it is SLICE, the items that are left are answered by the caller's next call.

local scanned = 0 -- entries read by merging, compacting and counting
