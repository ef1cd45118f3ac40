package rdmanet

import "strings"

// Extensions says which extensions of SMB Direct the two ends of a connection have agreed
// on; docs/protocol.md in the repository has their formats. The zero value stands for plain
// SMB Direct: the peer is not rdmanet.
type Extensions struct {
	// EarlyNegotiation is set if the negotiation was part of the connection set-up and cost
	// no messages of its own.
	EarlyNegotiation bool

	// HalfClose is set if each direction of the stream can end by itself: CloseWrite works.
	HalfClose bool

	// MessageFlags is set if messages can be Expedited, Partial, NoResponse or empty.
	MessageFlags bool

	// SendTransfers and ReceiveTransfers say how the devices move large transfers to the
	// peer and from it. One may differ from the other.
	SendTransfers    TransferMode
	ReceiveTransfers TransferMode

	// ProbeTarget is set if the keep-alive probes of this side read one byte that the peer
	// has opened for that, because the peer's device may fail at RDMA Reads of no bytes.
	ProbeTarget bool

	// LargeSegments is set if segments of this end, of the peer, or of both have up to 64 KiB
	// while bulk data moves, and their usual size (Info.MaxSendSize, Info.MaxReceiveSize)
	// otherwise. That is so where a device pins memory and no program has set MaxSendSize or
	// MaxReceiveSize.
	LargeSegments bool

	// HeldSends is set if the peer's device holds what it has no receive for, as TCP's window
	// does, so that there are neither credits nor large transfers. That is so between software
	// devices on Linux, unless Config.TransferSize asks for transfers.
	HeldSends bool
}

// TransferMode says how the devices move a large transfer; see Config.TransferSize.
type TransferMode uint8

const (
	// TransferNone is the mode of a direction without large transfers: all goes in segments.
	TransferNone TransferMode = iota

	// TransferRead is the mode in which the receiver's device reads from the sender's memory.
	TransferRead

	// TransferWrite is the mode in which the sender's device writes to the receiver's memory.
	TransferWrite
)

// String returns "none", "RDMA Read" or "RDMA Write".
func (m TransferMode) String() string {
	names := [...]string{"none", "RDMA Read", "RDMA Write"}
	if int(m) < len(names) {
		return names[m]
	}
	return "unknown"
}

// String lists the extensions, or says "none".
func (e Extensions) String() string {
	var list []string
	add := func(agreed bool, what string) {
		if agreed {
			list = append(list, what)
		}
	}
	add(e.EarlyNegotiation, "early negotiation")
	add(e.HalfClose, "half-close")
	add(e.MessageFlags, "message flags")
	if e.SendTransfers == e.ReceiveTransfers {
		add(e.SendTransfers != TransferNone, "transfers by "+e.SendTransfers.String())
	} else {
		add(e.SendTransfers != TransferNone, "sends by "+e.SendTransfers.String())
		add(e.ReceiveTransfers != TransferNone, "receives by "+e.ReceiveTransfers.String())
	}
	add(e.ProbeTarget, "probe target")
	add(e.LargeSegments, "large segments")
	add(e.HeldSends, "held sends")
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}
