package ibv

import "fmt"

// WC is a work completion, after struct ibv_wc. Unless Status is [WCSuccess], only ID,
// Status, VendorErr and QPN are valid.
type WC struct {
	ID        uint64
	Status    WCStatus
	Op        WCOpcode
	Flags     WCFlags
	VendorErr uint32 // VendorErr is the device's own code for a failure.
	QPN       uint32
	ByteLen   uint32 // ByteLen is how many bytes were received or read.
	Imm       uint32 // Imm is valid with WCWithImm.
	InvKey    uint32 // InvKey is the key that the peer has invalidated. It is valid with WCWithInv.

	// These fields are valid for a received datagram. SrcQP is the peer's queue pair.
	// [PD.CreateAHFromWC] uses the others, for InfiniBand's own switches.
	SrcQP        uint32
	SLID         uint16
	SL           uint8
	DLIDPathBits uint8
}

// WCOpcode is the operation that was completed, after enum ibv_wc_opcode.
type WCOpcode uint8

// These are the completed operations.
const (
	WCSend WCOpcode = iota
	WCWrite
	WCRead
	WCCmpSwap
	WCFetchAdd
	WCLocalInv
	WCRecv
	WCRecvWriteImm
)

// String returns the operation's name in lower case.
func (o WCOpcode) String() string {
	names := [...]string{"send", "write", "read", "compare and swap", "fetch and add", "local invalidate",
		"receive", "receive of write with immediate"}
	if int(o) < len(names) {
		return names[o]
	}
	return "unknown"
}

// IsRecv reports whether a receive was completed, and not a request of the send queue.
func (o WCOpcode) IsRecv() bool { return o >= WCRecv }

// WCFlags say which fields of a completion are valid, and whether a network header is in
// front of a datagram.
type WCFlags uint8

// These are the flags.
const (
	WCWithImm WCFlags = 1 << iota
	WCWithInv
	WCGRH // WCGRH: a header is in front of the datagram, see [GRHLen].
)

// WCStatus is the result of a work request, after enum ibv_wc_status. It has the values of
// the C header. The statuses of failures are errors.
type WCStatus uint8

// These are the statuses. ibv_poll_cq(3) and the InfiniBand architecture, volume 1, section
// 11.6.2, describe when each occurs.
const (
	WCSuccess WCStatus = iota
	WCLocLenErr
	WCLocQPOpErr
	WCLocEECOpErr
	WCLocProtErr
	WCFlushErr
	WCMWBindErr
	WCBadRespErr
	WCLocAccessErr
	WCRemInvReqErr
	WCRemAccessErr
	WCRemOpErr
	WCRetryExcErr
	WCRNRRetryExcErr
	WCLocRDDViolErr
	WCRemInvRDReqErr
	WCRemAbortErr
	WCInvEECNErr
	WCInvEECStateErr
	WCFatalErr
	WCRespTimeoutErr
	WCGeneralErr
)

var wcStatusNames = [...]string{
	WCSuccess:        "success",
	WCLocLenErr:      "local length error",
	WCLocQPOpErr:     "local QP operation error",
	WCLocEECOpErr:    "local EE context operation error",
	WCLocProtErr:     "local protection error",
	WCFlushErr:       "work request flushed error",
	WCMWBindErr:      "memory window bind error",
	WCBadRespErr:     "bad response error",
	WCLocAccessErr:   "local access error",
	WCRemInvReqErr:   "remote invalid request error",
	WCRemAccessErr:   "remote access error",
	WCRemOpErr:       "remote operation error",
	WCRetryExcErr:    "transport retry counter exceeded",
	WCRNRRetryExcErr: "RNR retry counter exceeded",
	WCLocRDDViolErr:  "local RDD violation error",
	WCRemInvRDReqErr: "remote invalid RD request",
	WCRemAbortErr:    "remote aborted error",
	WCInvEECNErr:     "invalid EE context number",
	WCInvEECStateErr: "invalid EE context state",
	WCFatalErr:       "fatal error",
	WCRespTimeoutErr: "response timeout error",
	WCGeneralErr:     "general error",
}

// String returns the name that ibv_wc_status_str(3) documents for the status.
func (s WCStatus) String() string {
	if int(s) < len(wcStatusNames) {
		return wcStatusNames[s]
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// Error makes the statuses usable with errors.Is.
func (s WCStatus) Error() string { return s.String() }

// WCError is a completion that failed, as an error. It matches its Status
// under errors.Is.
type WCError struct {
	Status    WCStatus
	Op        WCOpcode
	ID        uint64
	VendorErr uint32
	Device    string
}

// Error names the operation, the status, the vendor's code and the device.
func (e *WCError) Error() string {
	return fmt.Sprintf("%s on %s: %s (vendor error %#x, wr %d)", e.Op, e.Device, e.Status, e.VendorErr, e.ID)
}

// Unwrap returns the Status.
func (e *WCError) Unwrap() error { return e.Status }
