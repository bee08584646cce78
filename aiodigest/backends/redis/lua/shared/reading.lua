-- reading: a page of entries, which may come from several lists.

local PAGE_BYTES = 262144
local entries, bytes = {}, 0

-- Append to the page what a list holds from a place on, until the page has `length` entries or is large.
local function append_page(list, from, length)
  while #entries < length and bytes < PAGE_BYTES do
    local found = call('LRANGE', list, from, from + math.min(32, length - #entries) - 1)
    if #found == 0 then
      return
    end
    for _, entry in ipairs(found) do
      entries[#entries + 1] = entry
      bytes = bytes + #entry
    end
    from = from + #found
  end
end
