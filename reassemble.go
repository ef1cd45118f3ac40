package rdmanet

var (
	errMessageSize    = &protocolError{"RemainingDataLength", "message longer than the size negotiated"}
	errDataBeyondRest = &protocolError{"DataLength", "more than the rest of the message"}
	errRemaining      = &protocolError{"RemainingDataLength", "not what is left of the message"}
	errFINInMessage   = &protocolError{"Flags", "FIN before the end of the message"}
	errDataAfterFIN   = &protocolError{"DataLength", "payload after FIN"}
	errEmptyFlag      = &protocolError{"Flags", "an empty message with payload"}
	errMessageFlags   = &protocolError{"Flags", "not those that the message began with"}
	errMessageInside  = &protocolError{"Flags", "a message inside one of the other kind"}
)

// A reassembler follows where one message ends and the next begins in the
// segments received. It holds no data: payload is handed on as it arrives.
type reassembler struct {
	max uint32 // MaxFragmentedRecvSize, the longest message we said we take
	fin bool   // featureFIN was agreed: heed flagFIN

	messages bool // featureMessages was agreed: heed its flags

	remaining uint32 // FragmentReassemblyRemaining; 0 between messages
	rest      uint64 // of a message that comes by transfers, what follows the last one
	ended     bool   // flagFIN was received: no payload may follow

	flags  uint16 // flagExpedited and flagPartial of the message under way, or of the last one
	before uint16 // and of the one before the last that came by transfers
}

// open reports whether the last message was a piece of a longer one.
func (r *reassembler) open() bool { return r.flags&flagPartial != 0 }

// flagged checks the flags of a segment of a message, which may be its first, and
// returns those that belong to the message. A message that comes in several must
// be ended before one of the other kind begins.
func (r *reassembler) flagged(h *segmentHeader, first bool) (uint16, error) {
	if !r.messages {
		return 0, nil
	}
	flags := h.Flags & (flagExpedited | flagPartial)
	switch {
	case !first && flags != r.flags:
		return 0, errMessageFlags
	case first && r.open() && (flags^r.flags)&flagExpedited != 0:
		return 0, errMessageInside
	}
	return flags, nil
}

// accept takes the next segment, in the order of arrival, its header parsed
// before. first and last say whether a message begins and ends with it; the
// state is unchanged where err is not nil.
//
// [MS-SMBD] 3.1.5.8 bounds the sum of both lengths and lets the remainder fall
// by DataLength with each segment, so what is announced must be exactly that
// remainder. A message with neither payload nor remainder carries credits, a
// keep-alive or FIN only: it belongs to no message, leaves the reassembly alone
// and is neither first nor last. Read literally the text ends the connection
// when one arrives between two segments, but Linux sends them there. A segment
// may be empty and announce a remainder, as the text allows: it begins a
// message, or repeats the remainder of the current one.
//
// Where featureMessages was agreed, flagEmpty makes a message of what has neither.
func (r *reassembler) accept(h *segmentHeader) (first, last bool, err error) {
	sum := uint64(h.DataLength) + uint64(h.Remaining) // cannot wrap
	if sum > uint64(r.max) {
		return false, false, errMessageSize
	}
	empty := sum == 0
	remaining, flags := r.remaining, r.flags
	if r.messages && h.Flags&flagEmpty != 0 {
		if !empty {
			return false, false, errEmptyFlag
		}
		empty = false
	}
	if !empty {
		if r.ended {
			return false, false, errDataAfterFIN
		}
		if r.rest > 0 {
			return false, false, errTransferRest
		}
		first = remaining == 0
		if !first {
			if h.DataLength > remaining {
				return false, false, errDataBeyondRest
			}
			if h.Remaining != remaining-h.DataLength {
				return false, false, errRemaining
			}
		}
		remaining = h.Remaining
		if flags, err = r.flagged(h, first); err != nil {
			return false, false, err
		}
	}
	fin := r.fin && h.Flags&flagFIN != 0
	if fin && (remaining != 0 || r.rest > 0 || flags&flagPartial != 0) {
		return false, false, errFINInMessage
	}
	r.ended = r.ended || fin
	r.remaining, r.flags = remaining, flags
	return first, !empty && remaining == 0, nil
}

// acceptTransfer is accept for a message with an offer or a request, which
// stands for the payload it carries and what the transfer moves. A message that
// begins so goes on so.
func (r *reassembler) acceptTransfer(h *segmentHeader, t *transferHeader) (first, last bool, err error) {
	sum := uint64(h.DataLength) + uint64(t.Length) + t.Rest // cannot wrap
	switch {
	case r.ended:
		return false, false, errDataAfterFIN
	case r.fin && h.Flags&flagFIN != 0:
		return false, false, errFINInMessage
	case r.messages && h.Flags&flagEmpty != 0:
		return false, false, errEmptyFlag
	case r.remaining > 0 || r.rest > 0 && r.rest != sum:
		return false, false, errTransferRest
	}
	first = r.rest == 0
	flags, err := r.flagged(h, first)
	if err != nil {
		return false, false, err
	}
	if first {
		r.before = r.flags
	}
	r.rest, r.flags = t.Rest, flags
	return first, t.Rest == 0, nil
}

// undo takes back a message of which nothing but its first transfer has come, which
// was withdrawn as a whole.
func (r *reassembler) undo() { r.rest, r.flags = 0, r.before }
