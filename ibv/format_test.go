package ibv_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	payload := printedtest.Payload(64 << 10)
	sgl := []ibv.SGE{{Buf: payload, LKey: 7}, {Buf: payload[:5]}}
	printedtest.CheckMethods(t, map[string]any{
		"SGE": sgl[0], "SendWR": ibv.SendWR{Op: ibv.OpWrite, SGL: sgl}, "RecvWR": ibv.RecvWR{SGL: sgl},
		"send to invalidate": ibv.SendWR{Op: ibv.OpSendInv, SGL: sgl},
		"ConnParam":          ibv.ConnParam{Private: payload[:500]}, "RejectError": &ibv.RejectError{Private: payload[:100], Text: "no"},
		"Access": ibv.AccessRemoteRead, "Ack": ibv.AckAll, "ProviderAttr": ibv.ProviderAttr{}, "Caps": ibv.CapSolicited, "DeviceAttr": ibv.DeviceAttr{},
		"PortAttr": ibv.PortAttr{GIDs: make([]ibv.GID, 2)}, "PortState": ibv.PortActive, "GID": ibv.GID{}, "Transport": ibv.TransportRoCE,
		"Event": ibv.Event{Kind: ibv.EventQPFatal, Err: errors.New("a reason")}, "EventKind": ibv.EventPortError,
		"AHAttr": ibv.AHAttr{}, "UDParam": ibv.UDParam{}, "JoinFlags": ibv.JoinFullMember, "WC": ibv.WC{}, "WCOpcode": ibv.WCSend,
		"WCFlags": ibv.WCWithImm, "WCStatus": ibv.WCSuccess, "WCError": &ibv.WCError{Status: ibv.WCFlushErr, Device: "a device"}, "Opcode": ibv.OpSend, "SendFlags": ibv.SendInline,
		"QPCap": ibv.QPCap{}, "QPInit": ibv.QPInit{}, "QPState": ibv.QPState(2), "Quirks": ibv.Quirks{},
	})
}

func TestFlagNames(t *testing.T) {
	printedtest.CheckFlags(t, "Caps", "Cap", func(bit uint64) string { return ibv.Caps(bit).String() })
	printedtest.CheckFlags(t, "Access", "Access", func(bit uint64) string { return ibv.Access(bit).String() })
	printedtest.CheckFlags(t, "SendFlags", "Send", func(bit uint64) string { return ibv.SendFlags(bit).String() })
	printedtest.CheckFlags(t, "WCFlags", "WC", func(bit uint64) string { return ibv.WCFlags(bit).String() })
}

func TestStrings(t *testing.T) {
	for want, v := range map[string]fmt.Stringer{
		"receive, ID 7, 20 bytes, WithInv, key 0x1f":         ibv.WC{ID: 7, Op: ibv.WCRecv, ByteLen: 20, Flags: ibv.WCWithInv, InvKey: 31},
		"receive, ID 7, 20 bytes, WithImm, immediate 0x2a":   ibv.WC{ID: 7, Op: ibv.WCRecv, ByteLen: 20, Flags: ibv.WCWithImm, Imm: 42},
		"receive, ID 7, 20 bytes, from QPN 9":                ibv.WC{ID: 7, Op: ibv.WCRecv, ByteLen: 20, SrcQP: 9},
		"ID 7, work request flushed error, vendor error 0x2": ibv.WC{ID: 7, Status: ibv.WCFlushErr, VendorErr: 2, ByteLen: 9},
		"disconnected":                                  ibv.Event{},
		"port error: a reason":                          ibv.Event{Kind: ibv.EventPortError, Err: errors.New("a reason")},
		"{SendsBuffered:true}":                          ibv.Quirks{SendsBuffered: true},
		"{MaxSendWR:4 MaxInline:64}":                    ibv.QPCap{MaxSendWR: 4, MaxInline: 64},
		"{State:active ActiveMTU:4096 GIDs:2 elements}": ibv.PortAttr{State: ibv.PortActive, ActiveMTU: 4096, GIDs: make([]ibv.GID, 2)},
		"LocalWrite|RemoteRead":                         ibv.AccessLocalWrite | ibv.AccessRemoteRead,
		"send only":                                     ibv.JoinSendOnly,
		"Send, ID 3, flags Signaled|Inline, 5 bytes in 1 elements": ibv.SendWR{ID: 3, Flags: ibv.SendSignaled | ibv.SendInline, SGL: []ibv.SGE{{Buf: make([]byte, 5)}}},
	} {
		require.Equal(t, want, v.String())
	}
}
