package main

import (
	"context"
	"errors"
	"io"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The messages are protobuf's well-known wrapper types, and the service is described here
// by hand. So the example needs no generated code.
type (
	text   = wrapperspb.StringValue
	number = wrapperspb.UInt32Value
)

const serviceName = "rdmanet.example.Demo"

// These are the full names of the methods.
const (
	methodUpper = "/" + serviceName + "/Upper"
	methodCount = "/" + serviceName + "/Count"
	methodSum   = "/" + serviceName + "/Sum"
)

// desc describes the service. Upper is a unary call, Count is a stream from the server, and
// Sum has streams in both directions.
var desc = grpc.ServiceDesc{
	ServiceName: serviceName,
	HandlerType: (*any)(nil), // the handlers below need no object
	Methods: []grpc.MethodDesc{{
		MethodName: "Upper",
		Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := new(text)
			if err := decode(in); err != nil {
				return nil, err
			}
			return upper(ctx, in)
		},
	}},
	Streams: []grpc.StreamDesc{{
		StreamName:    "Count",
		ServerStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			in := new(number)
			if err := stream.RecvMsg(in); err != nil {
				return err
			}
			return count(in, &grpc.GenericServerStream[number, number]{ServerStream: stream})
		},
	}, {
		StreamName:    "Sum",
		ServerStreams: true,
		ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			return sum(&grpc.GenericServerStream[number, number]{ServerStream: stream})
		},
	}},
}

// upper returns the text in capitals. It refuses an empty text.
func upper(_ context.Context, in *text) (*text, error) {
	if in.Value == "" {
		return nil, status.Error(codes.InvalidArgument, "empty text")
	}
	return wrapperspb.String(strings.ToUpper(in.Value)), nil
}

// count sends 1, 2, 3 ... in.Value.
func count(in *number, out grpc.ServerStreamingServer[number]) error {
	for i := range in.Value {
		if err := out.Send(wrapperspb.UInt32(i + 1)); err != nil {
			return err
		}
	}
	return nil
}

// sum answers each number with the total so far.
func sum(stream grpc.BidiStreamingServer[number, number]) error {
	var total uint32
	for {
		in, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		total += in.Value
		if err := stream.Send(wrapperspb.UInt32(total)); err != nil {
			return err
		}
	}
}
