package ibv

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/rdmanet/rdmanet/internal/printed"
)

// Values print as one short line, by package fmt and by log/slog. Those that refer to memory
// print without the bytes in it, for every formatting verb of package fmt: the bytes are
// payload, and may belong to the device.

// String says how many bytes, and the key.
func (e SGE) String() string { return fmt.Sprintf("%d bytes, key %#x", len(e.Buf), e.LKey) }

// Format prints String's text for every verb.
func (e SGE) Format(s fmt.State, verb rune) { printed.Format(s, verb, e.String()) }

// LogValue logs String's text.
func (e SGE) LogValue() slog.Value { return slog.StringValue(e.String()) }

// String says what is to be done.
func (w SendWR) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v, ID %d, flags %v, %s", w.Op, w.ID, w.Flags, elements(w.SGL))
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

// LogValue logs Error's text.
func (e *WCError) LogValue() slog.Value {
	if e == nil {
		return slog.StringValue("<nil>")
	}
	return slog.StringValue(e.Error())
}

// String says what was completed, and how.
func (w WC) String() string {
	if w.Status != WCSuccess {
		return fmt.Sprintf("ID %d, %v, vendor error %#x", w.ID, w.Status, w.VendorErr)
	}
	text := fmt.Sprintf("%v, ID %d, %d bytes", w.Op, w.ID, w.ByteLen)
	if w.Flags != 0 {
		text += ", " + w.Flags.String()
	}
	if w.Flags&WCWithImm != 0 {
		text += fmt.Sprintf(", immediate %#x", w.Imm)
	}
	if w.Flags&WCWithInv != 0 {
		text += fmt.Sprintf(", key %#x", w.InvKey)
	}
	if w.SrcQP != 0 {
		text += fmt.Sprintf(", from QPN %d", w.SrcQP)
	}
	return text
}

// LogValue logs String's text.
func (w WC) LogValue() slog.Value { return slog.StringValue(w.String()) }

// String says what has happened, and why.
func (e Event) String() string {
	if e.Err == nil {
		return e.Kind.String()
	}
	return e.Kind.String() + ": " + e.Err.Error()
}

// LogValue logs String's text.
func (e Event) LogValue() slog.Value { return slog.StringValue(e.String()) }

// String lists the fields that are not zero.
func (a ProviderAttr) String() string { return printed.Struct(a) }

// LogValue logs the fields that are not zero.
func (a ProviderAttr) LogValue() slog.Value { return printed.LogStruct(a) }

// String lists the fields that are not zero.
func (a DeviceAttr) String() string { return printed.Struct(a) }

// LogValue logs the fields that are not zero.
func (a DeviceAttr) LogValue() slog.Value { return printed.LogStruct(a) }

// String lists the fields that are not zero.
func (q Quirks) String() string { return printed.Struct(q) }

// LogValue logs the fields that are not zero.
func (q Quirks) LogValue() slog.Value { return printed.LogStruct(q) }

// String lists the fields that are not zero.
func (a PortAttr) String() string { return printed.Struct(a) }

// LogValue logs the fields that are not zero.
func (a PortAttr) LogValue() slog.Value { return printed.LogStruct(a) }

// String lists the fields that are not zero.
func (a AHAttr) String() string { return printed.Struct(a) }

// LogValue logs the fields that are not zero.
func (a AHAttr) LogValue() slog.Value { return printed.LogStruct(a) }

// String lists the fields that are not zero.
func (p UDParam) String() string { return printed.Struct(p) }

// LogValue logs the fields that are not zero.
func (p UDParam) LogValue() slog.Value { return printed.LogStruct(p) }

// String lists the fields that are not zero.
func (c QPCap) String() string { return printed.Struct(c) }

// LogValue logs the fields that are not zero.
func (c QPCap) LogValue() slog.Value { return printed.LogStruct(c) }

// String lists the fields that are not zero.
func (i QPInit) String() string { return printed.Struct(i) }

// LogValue logs the fields that are not zero.
func (i QPInit) LogValue() slog.Value { return printed.LogStruct(i) }

// String names the operations and properties.
func (c Caps) String() string {
	return printed.Flags(uint64(c), "SendInvalidate", "SendImm", "WriteImm", "Atomic", "LocalInvalidate", "UD", "Solicited", "QPRegion", "Multicast", "OnDemandPaging", "WaitReceives", "EmptyReads", "TCPPorts", "HoldSends")
}

// LogValue logs String's text.
func (c Caps) LogValue() slog.Value { return slog.StringValue(c.String()) }

// String names the rights.
func (a Access) String() string {
	return printed.Flags(uint64(a), "LocalWrite", "RemoteWrite", "RemoteRead", "RemoteAtomic")
}

// LogValue logs String's text.
func (a Access) LogValue() slog.Value { return slog.StringValue(a.String()) }

// String names the flags.
func (f SendFlags) String() string {
	return printed.Flags(uint64(f), "Signaled", "Inline", "Solicited", "Fence")
}

// LogValue logs String's text.
func (f SendFlags) LogValue() slog.Value { return slog.StringValue(f.String()) }

// String names the flags.
func (f WCFlags) String() string { return printed.Flags(uint64(f), "WithImm", "WithInv", "GRH") }

// LogValue logs String's text.
func (f WCFlags) LogValue() slog.Value { return slog.StringValue(f.String()) }

// String returns "full member" or "send only".
func (f JoinFlags) String() string {
	switch f {
	case JoinFullMember:
		return "full member"
	case JoinSendOnly:
		return "send only"
	}
	return "unknown"
}

// LogValue logs String's text.
func (f JoinFlags) LogValue() slog.Value { return slog.StringValue(f.String()) }

// LogValue logs String's text.
func (t Transport) LogValue() slog.Value { return slog.StringValue(t.String()) }

// LogValue logs String's text.
func (s PortState) LogValue() slog.Value { return slog.StringValue(s.String()) }

// LogValue logs String's text.
func (g GID) LogValue() slog.Value { return slog.StringValue(g.String()) }

// LogValue logs String's text.
func (a Ack) LogValue() slog.Value { return slog.StringValue(a.String()) }

// LogValue logs String's text.
func (k EventKind) LogValue() slog.Value { return slog.StringValue(k.String()) }

// LogValue logs String's text.
func (o WCOpcode) LogValue() slog.Value { return slog.StringValue(o.String()) }

// LogValue logs String's text.
func (s WCStatus) LogValue() slog.Value { return slog.StringValue(s.String()) }

// LogValue logs String's text.
func (o Opcode) LogValue() slog.Value { return slog.StringValue(o.String()) }

// LogValue logs String's text.
func (s QPState) LogValue() slog.Value { return slog.StringValue(s.String()) }

// elements says how long a list of elements is.
func elements(list []SGE) string {
	n := 0
	for _, e := range list {
		n += len(e.Buf)
	}
	return fmt.Sprintf("%d bytes in %d elements", n, len(list))
}
