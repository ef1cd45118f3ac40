package ibv

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// Values that refer to memory print without the bytes in it, by package fmt with any verb
// and by log/slog: those are payload, and may belong to the device.

// String says how many bytes, and the key.
func (e SGE) String() string { return fmt.Sprintf("%d bytes, key %#x", len(e.Buf), e.LKey) }

// Format prints String's text for every verb.
func (e SGE) Format(s fmt.State, verb rune) { printed.Format(s, verb, e.String()) }

// LogValue logs String's text.
func (e SGE) LogValue() slog.Value { return slog.StringValue(e.String()) }

// String says what is to be done.
func (w SendWR) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v, ID %d, flags %#x, %s", w.Op, w.ID, uint8(w.Flags), elements(w.SGL))
	switch w.Op {
	case OpWrite, OpWriteImm, OpRead, OpCmpSwap, OpFetchAdd:
		fmt.Fprintf(&b, ", remote address %#x, key %#x", w.RemoteAddr, w.RKey)
	case OpSendInv, OpLocalInv:
		fmt.Fprintf(&b, ", invalidates %#x", w.InvKey)
	}
	if w.AH != nil {
		fmt.Fprintf(&b, ", to queue pair %#x", w.RemoteQPN)
	}
	return b.String()
}

// Format prints String's text for every verb.
func (w SendWR) Format(s fmt.State, verb rune) { printed.Format(s, verb, w.String()) }

// LogValue logs String's text.
func (w SendWR) LogValue() slog.Value { return slog.StringValue(w.String()) }

// String says how much can be received.
func (w RecvWR) String() string { return fmt.Sprintf("receive, ID %d, %s", w.ID, elements(w.SGL)) }

// Format prints String's text for every verb.
func (w RecvWR) Format(s fmt.State, verb rune) { printed.Format(s, verb, w.String()) }

// LogValue logs String's text.
func (w RecvWR) LogValue() slog.Value { return slog.StringValue(w.String()) }

// String says how much private data there is, and the limits.
func (p ConnParam) String() string {
	return fmt.Sprintf("%d bytes of private data, %d RDMA Reads in, %d out, queue pair %#x",
		len(p.Private), p.ResponderResources, p.InitiatorDepth, p.QPN)
}

// Format prints String's text for every verb.
func (p ConnParam) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p ConnParam) LogValue() slog.Value { return slog.StringValue(p.String()) }

// Format prints Error's text for every verb.
func (e *RejectError) Format(s fmt.State, verb rune) { printed.Format(s, verb, e.Error()) }

// LogValue logs Error's text.
func (e *RejectError) LogValue() slog.Value {
	if e == nil {
		return slog.StringValue("<nil>")
	}
	return slog.StringValue(e.Error())
}

// elements says how long a list of elements is.
func elements(list []SGE) string {
	n := 0
	for _, e := range list {
		n += len(e.Buf)
	}
	return fmt.Sprintf("%d bytes in %d elements", n, len(list))
}
